"""The ways to prefill that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mlx_specprefill import InvalidRequestError, Keep, RuleName, keep_share

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

    @property
    def name(self) -> str:
        if self.keep is None:
            return self.kind
        return f"{self.kind}@{self.keep if isinstance(self.keep, str) else f'{float(self.keep):g}'}"

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

    Raises:
        InvalidRequestError: an unknown kind, or a share outside (0, 1].
    """
    shares = [keep_share(keep, "--keep") for keep in keeps]
    chosen = [FULL]
    for kind in kinds:
        if kind not in ARM_KINDS:
            raise InvalidRequestError(f"no arm {kind!r}; there are: {', '.join(ARM_KINDS)}")
        chosen += [Arm(kind, share) for share in shares if kind == "sparse" or (kind != "full" and share != "auto")]
    return tuple(dict.fromkeys(chosen))
