"""The ways to prefill that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mlx_specprefill import InvalidRequestError, Keep, RuleName, keep_share, max_loss

__all__ = ["ARM_KINDS", "FULL", "Arm", "ArmKind", "arms"]

ArmKind = Literal["full", "sparse", "paper", "random", "recency", "lexical", "renumbered", "oracle"]
ARM_KINDS: tuple[ArmKind, ...] = get_args(ArmKind)


@dataclass(frozen=True)
class Arm:
    """`keep` is None for the full prefill only; "auto" is for `sparse`, and may turn out to be a full prefill.

    `sparse` chooses by the library's rule. `paper` chooses by the published one, and what others choose by other scores
    is chosen in the published chunks.
    """

    kind: ArmKind
    keep: Keep | None = None
    max_loss: float | None = None  # of "auto"; None: the engine's

    @property
    def name(self) -> str:
        if self.keep is None:
            return self.kind
        return f"{self.kind}@{self._share}"

    @property
    def _share(self) -> str:
        if not isinstance(self.keep, str):
            return f"{float(self.keep or 1):g}"
        return self.keep if self.max_loss is None else f"{self.keep}:{self.max_loss:g}"

    @property
    def rule(self) -> RuleName:
        return "default" if self.kind in ("sparse", "renumbered") else "paper"

    @property
    def asks_draft(self) -> bool:
        return self.kind in ("sparse", "paper", "renumbered")

    @property
    def restored(self) -> Arm:
        """The arm that keeps the same tokens at their positions."""
        return Arm("sparse", self.keep) if self.kind == "renumbered" else self


FULL = Arm("full")


def arms(kinds: list[str], keeps: list[str]) -> tuple[Arm, ...]:
    """Every kind at every share; full prefill is always there, since all others are compared with it.

    Args:
        keeps: shares, "auto", or "auto:0.05" for a largest expected loss of its own.

    Raises:
        InvalidRequestError: an unknown kind, a share outside (0, 1], or a loss that is none.
    """
    shares = [_kept(keep) for keep in keeps]
    chosen = [FULL]
    for kind in kinds:
        if kind not in ARM_KINDS:
            raise InvalidRequestError(f"no arm {kind!r}; there are: {', '.join(ARM_KINDS)}")
        chosen += [Arm(kind, *kept) for kept in shares if kind == "sparse" or (kind != "full" and kept[0] != "auto")]
    return tuple(dict.fromkeys(chosen))


def _kept(value: str) -> tuple[Keep, float | None]:
    keep, _, loss = value.partition(":")
    if loss and keep == "auto":
        return "auto", max_loss(loss, "--keep auto")
    return keep_share(value, "--keep"), None
