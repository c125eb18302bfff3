"""The kinds of prefill under comparison."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from mlx_specprefill import InvalidRequestError, RuleName, keep_pct

ShareKind = Literal["sparse", "absent", "paper", "random", "random-absent", "recency", "lexical", "oracle"]
ServedKind = Literal["served"]
ArmKind = Literal["full", ShareKind, ServedKind]
ARM_KINDS: tuple[ArmKind, ...] = get_args(ArmKind)
SERVED_KINDS: tuple[ServedKind, ...] = get_args(ServedKind)


@dataclass(frozen=True)
class Arm:
    """One kind of prefill at one share. `keep` is None for the kinds without a share: full, served.

    `sparse` chooses by the library's rule. `paper` chooses by the published one, and what others choose by other scores
    is chosen in the published chunks. `absent` and `random-absent` estimate nothing, as `paper` does; the others do
    where the pair has a map. `served` leaves everything to the server.
    """

    kind: ArmKind
    keep: Fraction | None = None

    @property
    def name(self) -> str:
        return self.kind if self.keep is None else f"{self.kind}@{float(self.keep):g}"

    @property
    def rule(self) -> RuleName:
        return "default" if self.kind in ("sparse", "absent") else "paper"

    @property
    def estimates(self) -> bool:
        return self.kind not in ("absent", "random-absent", "paper")

    @property
    def asks_draft(self) -> bool:
        return self.kind in ("sparse", "absent", "paper")


FULL = Arm("full")


def arms(kinds: list[str], keeps: list[str]) -> tuple[Arm, ...]:
    """Return every kind at every share. Full prefill is always included: all others are compared with it.

    Args:
        keeps: shares in (0, 1].

    Raises:
        InvalidRequestError: an unknown kind, or a share outside (0, 1].
    """
    shares = [keep_pct(keep, "--keep") for keep in keeps]
    chosen = [FULL]
    for kind in kinds:
        if kind not in ARM_KINDS:
            raise InvalidRequestError(f"no arm {kind!r}; there are: {', '.join(ARM_KINDS)}")
        bare = kind == "full" or kind in SERVED_KINDS
        chosen += [Arm(kind)] if bare else [Arm(kind, share) for share in shares]
    return tuple(dict.fromkeys(chosen))
