"""Where the messages lie in a rendered prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

__all__ = ["PromptSpan", "opening_of"]

SpanKind = Literal["system", "tools", "user", "assistant", "tool", "other"]


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """One rendered message: prompt indices of the whole message and of its content, both [start, end).

    `start..content_start` is the role header, `content_end..end` the end-of-turn marker. Tool definitions that the
    template puts into the system message belong to it, or form a span of kind "tools".
    """

    kind: SpanKind
    start: int
    content_start: int
    content_end: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.content_start <= self.content_end <= self.end:
            raise ValueError(f"span bounds must be ordered: {self}")


def opening_of(spans: Sequence[PromptSpan]) -> int:
    """Tokens of the system messages and tool definitions that a prompt begins with."""
    return max((span.end for span in takewhile(lambda span: span.kind in ("system", "tools"), spans)), default=0)
