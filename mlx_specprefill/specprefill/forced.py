"""Which tokens are kept whatever the draft thinks of them. Pure: spans and counts in, ranges out.

The paper keeps nothing by force and so may drop the end of the chat template, or even the last prompt token, whose
logits are the answer's first token. Everything here protects structure: what the template adds, what the system says,
what the user asks. Long documents inside the last user message stay open to selection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..config import SelectionConfig
from ..request import PromptSpan

__all__ = ["ForcedRange", "forced_mask", "forced_ranges", "template_mask"]

USER_WHOLE, USER_HEAD, USER_TAIL = (2048, 8), (128, 64), (512, 16)  # (most tokens, divisor of the prompt length)
TOOL_HEAD, TOOL_TAIL = 64, 128  # of a tool result that follows the last user message


class ForcedRange(NamedTuple):
    """Prompt indices [start, end) and why they are kept."""

    start: int
    end: int
    reason: str


def forced_ranges(spans: Sequence[PromptSpan], prompt_len: int, config: SelectionConfig) -> list[ForcedRange]:
    """The ranges that are always kept, clipped to the prompt, in no particular order; they may overlap.

    Args:
        spans: rendered messages in prompt order; none for a raw completion, which is treated as one user message.
        prompt_len: M >= 1.
    """
    last = ForcedRange(prompt_len - 1, prompt_len, "last prompt token")
    if config.forced == "last-token":
        return [last]
    ranges = [ForcedRange(0, config.chunk_size, "first chunk"), last]
    ranges += _structure(spans, prompt_len)
    ranges += _system(spans, config.verbatim_system_limit)
    ranges += _last_turn(spans or [PromptSpan("user", 0, 0, prompt_len, prompt_len)], prompt_len)
    return [ForcedRange(r.start, min(r.end, prompt_len), r.reason) for r in ranges if r.start < min(r.end, prompt_len)]


def forced_mask(ranges: Sequence[ForcedRange], prompt_len: int) -> npt.NDArray[np.bool_]:
    """(M,) true where a range covers the token."""
    mask = np.zeros(prompt_len, dtype=np.bool_)
    for r in ranges:
        mask[r.start : r.end] = True
    return mask


def template_mask(
    spans: Sequence[PromptSpan], question: tuple[int, int], forced: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """(M,) the forced tokens that are not part of what is asked about: the first one, the template's, the question's.

    Much attention goes to them for no reason that lies in the document: the first token and the delimiters are sinks,
    and the question's tokens look at each other.

    Args:
        question: [start, end) of the tokens that ask.
        forced: (M,) true where a token is kept anyway.
    """
    asks = ForcedRange(*question, "question")
    template = forced_mask([ForcedRange(0, 1, "first token"), asks, *_structure(spans, forced.size)], forced.size)
    return template & forced


def _structure(spans: Sequence[PromptSpan], prompt_len: int) -> Iterator[ForcedRange]:
    for span in spans:
        yield ForcedRange(span.start, span.content_start, "role header")
        yield ForcedRange(span.content_end, span.end, "end of turn")
    for before, after in pairwise(spans):
        yield ForcedRange(before.end, after.start, "template text")
    if spans:
        yield ForcedRange(0, spans[0].start, "template text")
        yield ForcedRange(spans[-1].end, prompt_len, "template tail")


def _system(spans: Sequence[PromptSpan], limit: int) -> Iterator[ForcedRange]:
    for span in spans:
        if span.kind in ("system", "tools") and limit > 0:
            end = min(span.content_end, span.content_start + limit)
            limit -= end - span.content_start
            yield ForcedRange(span.content_start, end, "system prompt and tools")


def _last_turn(spans: Sequence[PromptSpan], prompt_len: int) -> Iterator[ForcedRange]:
    """The last user message (or the last message, when no user speaks) and what follows it."""
    users = [i for i, span in enumerate(spans) if span.kind == "user"]
    asked = users[-1] if users else len(spans) - 1
    yield from _ends(spans[asked], prompt_len, USER_HEAD, USER_TAIL, "last user message")
    for span in spans[asked + 1 :]:
        if span.kind == "tool":
            yield from _ends(span, prompt_len, (TOOL_HEAD, 1), (TOOL_TAIL, 1), "tool result")
        else:
            yield from _ends(span, prompt_len, USER_HEAD, USER_TAIL, "after the last user message")


def _ends(
    span: PromptSpan, prompt_len: int, head: tuple[int, int], tail: tuple[int, int], reason: str
) -> Iterator[ForcedRange]:
    """The whole content when it is short, else its two ends."""
    start, end = span.content_start, span.content_end
    if end - start <= _share(prompt_len, USER_WHOLE):
        yield ForcedRange(start, end, reason)
        return
    yield ForcedRange(start, min(end, start + _share(prompt_len, head)), f"{reason}: head")
    yield ForcedRange(max(start, end - _share(prompt_len, tail)), end, f"{reason}: tail")


def _share(prompt_len: int, rule: tuple[int, int]) -> int:
    most, divisor = rule
    return min(most, prompt_len // divisor)
