"""Which tokens are kept whatever the draft thinks of them. Pure: spans and counts in, ranges out.

The paper keeps nothing by force and so may drop the end of the chat template, or even the last prompt token, whose
logits are the answer's first token. Everything here protects structure: what the template adds, what the system says,
what the user asks. Long documents inside the last user message stay open to selection, and in scope "all" also a long
system text between its ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..config import Scope, SelectionConfig
from ..request import PromptSpan

__all__ = ["ForcedRange", "forced_mask", "forced_ranges", "template_mask"]

USER_WHOLE, USER_HEAD, USER_TAIL = (2048, 8), (128, 64), (512, 16)  # (most tokens, divisor of the prompt length)
TOOL_HEAD, TOOL_TAIL = 64, 128  # of a tool result that follows the last user message
SYSTEM_WHOLE, SYSTEM_ENDS = 512, 256  # tokens: a shorter system text is kept in either scope; of a longer one both ends


class ForcedRange(NamedTuple):
    """Prompt indices [start, end) and why they are kept."""

    start: int
    end: int
    reason: str


def forced_ranges(
    spans: Sequence[PromptSpan], prompt_len: int, config: SelectionConfig, scope: Scope = "user"
) -> list[ForcedRange]:
    """The ranges that are always kept, clipped to the prompt, in no particular order; they may overlap.

    Args:
        spans: rendered messages in prompt order; none for a raw completion, which is treated as one user message.
        prompt_len: M >= 1.
        scope: what competes, as in `SpecPrefillPolicy.scope`.
    """
    last = ForcedRange(prompt_len - 1, prompt_len, "last prompt token")
    if config.forced == "last-token":
        return [last]
    ranges = [ForcedRange(0, config.chunk_size, "first chunk"), last]
    ranges += _structure(spans, prompt_len)
    ranges += _system(spans, config.verbatim_system_limit, scope)
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


def _system(spans: Sequence[PromptSpan], limit: int, scope: Scope) -> Iterator[ForcedRange]:
    for span in spans:
        if span.kind in ("system", "tools") and limit > 0:
            start, end = span.content_start, min(span.content_end, span.content_start + limit)
            limit -= end - start
            if scope == "user" or span.kind == "tools" or span.content_end - span.content_start <= SYSTEM_WHOLE:
                yield ForcedRange(start, end, "system prompt and tools")
            else:
                yield ForcedRange(start, min(start + SYSTEM_ENDS, end), "system prompt and tools")
                yield ForcedRange(span.content_end - SYSTEM_ENDS, end, "system prompt and tools")


def _last_turn(spans: Sequence[PromptSpan], prompt_len: int) -> Iterator[ForcedRange]:
    """The last user message (or the last message, when no user speaks) and what follows it.

    Of what follows, the newest is kept whole, up to as much as of a user message. Agents call tools many times for one
    user message: of what was said before that, the ends are kept.
    """
    users = [i for i, span in enumerate(spans) if span.kind == "user"]
    asked = users[-1] if users else len(spans) - 1
    yield from _ends(spans[asked], prompt_len, USER_HEAD, USER_TAIL, "last user message")
    whole = _share(prompt_len, USER_WHOLE)
    for span in reversed(spans[asked + 1 :]):
        if span.kind == "tool":
            yield from _ends(span, prompt_len, (TOOL_HEAD, 1), (TOOL_TAIL, 1), "tool result", whole)
        else:
            yield from _ends(span, prompt_len, USER_HEAD, USER_TAIL, "after the last user message", whole)
        whole = max(0, whole - (span.content_end - span.content_start))


def _ends(
    span: PromptSpan,
    prompt_len: int,
    head: tuple[int, int],
    tail: tuple[int, int],
    reason: str,
    whole: int | None = None,
) -> Iterator[ForcedRange]:
    """The whole content when it is short, else its two ends.

    Args:
        whole: tokens that are short; None: as many as of a user message.
    """
    start, end = span.content_start, span.content_end
    if end - start <= (_share(prompt_len, USER_WHOLE) if whole is None else whole):
        yield ForcedRange(start, end, reason)
        return
    yield ForcedRange(start, min(end, start + _share(prompt_len, head)), f"{reason}: head")
    yield ForcedRange(max(start, end - _share(prompt_len, tail)), end, f"{reason}: tail")


def _share(prompt_len: int, rule: tuple[int, int]) -> int:
    most, divisor = rule
    return min(most, prompt_len // divisor)
