"""Which sparse turn is made dense next. Integers and flags only."""

from __future__ import annotations

from dataclasses import dataclass

from .handle import RequestHandle

__all__ = ["DensifyQueue", "SparseTurn"]

_LIMIT = 8  # turns


@dataclass(frozen=True, slots=True)
class SparseTurn:
    """A turn that the target saw in part.

    Attributes:
        prompt: its token ids; `answer`: those that came back.
        handle: of its request; says whether the conversation is expected to go on.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    handle: RequestHandle

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer

    def outranks(self, other: SparseTurn) -> bool:
        """Whether it should take the device from `other`: only its next turn is certain to come."""
        return self.handle.expecting and not other.handle.expecting


class DensifyQueue:
    """Turns whose answers called a tool come first, newest first among equals; the last in order go when it is full.

    A turn stays in the queue until it is removed, also while it is being made dense.
    """

    def __init__(self) -> None:
        self._turns: list[SparseTurn] = []  # newest first

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn: SparseTurn) -> None:
        """The newest turn; it replaces earlier turns of its conversation."""
        others = [old for old in self._turns if turn.prompt[: len(old.prompt)] != old.prompt]
        self._turns = [turn, *others]
        if len(self._turns) > _LIMIT:
            self._turns.remove(self._in_order()[-1])

    def first(self) -> SparseTurn | None:
        return next(iter(self._in_order()), None)

    def discard(self, turn: SparseTurn) -> None:
        """Nothing more is to be done for it; no effect when it has been replaced."""
        if turn in self._turns:
            self._turns.remove(turn)

    def _in_order(self) -> list[SparseTurn]:
        return sorted(self._turns, key=lambda turn: not turn.handle.expecting)
