"""The place of each message in a rendered prompt, for any chat template; which messages and calls it leaves out.

The conversation is rendered a second time with marks around every message's text. If taking the marks out gives the
first rendering back, character for character, the marks tell the exact places, whatever the template did to the text.
Where it does not (a template that looks into the content), only texts that occur exactly once are taken.
Nothing is guessed: a message that can't be located becomes part of an "other" span, or of none.
The marks also tell which texts and calls the template leaves out.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from typing import Any

from mlx_specprefill import InvalidRequestError, PromptSpan, SpanKind

from .conversation import Message
from .deferred import LOADS
from .reminders import only_reminds

KINDS: Mapping[str, SpanKind] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
SHORTEST_UNIQUE = 16  # characters; shorter texts may occur once by accident
TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>", "<|call|>", "</s>",
    "[/INST]", "[/SYSTEM_PROMPT]", "[/AVAILABLE_TOOLS]", "[/TOOL_RESULTS]", "<|END_OF_TURN_TOKEN|>", "<|end_of_text|>",
    "<|endoftext|>", "<|eot|>", "<｜end▁of▁sentence｜>", "<|end_of_role|>",
)  # fmt: skip

EXCERPT = 60  # characters of a text that a warning names
STEM = re.compile("Qk([0-9]{1,9})zX")  # no text can contain all of them

Render = Callable[[Sequence[Message]], str]


@dataclass(frozen=True, slots=True)
class CharSpan:
    """A message in characters of the rendered text. The bounds mean those of PromptSpan."""

    kind: SpanKind
    start: int
    content_start: int
    content_end: int
    end: int


def turn_ends(eos: Sequence[str], known: Callable[[str], bool]) -> re.Pattern[str]:
    """Return a pattern of an end-of-turn marker and the line breaks after it.

    Args:
        eos: texts of the model's own end tokens.
        known: whether this model's template or vocabulary has a marker at all.
    """
    markers = sorted({*filter(None, eos), *filter(known, TURN_ENDS)}, key=len, reverse=True)
    return re.compile("(?:" + "|".join(map(re.escape, markers)) + r")\n*" if markers else r"(?!)")


@dataclass(frozen=True, slots=True)
class Marked:
    """A second rendering, with marks.

    Attributes:
        places: of each mark in the first rendering, by the mark's name; None: the marks changed the rendering.
        names: of the marks that are in it; None: the template refused it.
    """

    places: Mapping[str, list[int]] | None
    names: frozenset[str] | None


def mark(messages: Sequence[Message], text: str, render: Render) -> Marked:
    """Render the messages with marks.

    Args:
        text: `render(messages)`.
        render: the chat template with everything but the messages fixed.
    """
    stem = absent(text)
    try:
        marked = render([_with_marks(message, f"{stem}{i}") for i, message in enumerate(messages)])
    except InvalidRequestError:
        return Marked(None, None)
    parts = re.split(rf"{stem}(\d+[oc]\d*)x", marked)  # text and names of marks by turns
    plain, names = parts[::2], parts[1::2]
    places: dict[str, list[int]] = {}
    for name, at in zip(names, accumulate(map(len, plain)), strict=False):  # behind the last text is no mark
        places.setdefault(name, []).append(at)
    return Marked(places if "".join(plain) == text else None, frozenset(places))


def locate(
    messages: Sequence[Message], text: str, marked: Marked, ends: re.Pattern[str], has_tools: bool
) -> list[CharSpan]:
    """Return the spans of `text`, in order and without overlap. `messages` and `text` are those of `mark`."""
    places = _unique(messages, text) if marked.places is None else _places(len(messages), marked.places)
    return list(_spans(messages, text, _in_order(places), ends, has_tools))


def left_out(messages: Sequence[Message], text: str, marked: Marked) -> Iterator[str]:
    """Yield a sentence for each text and each call that is not in the rendering."""
    for i, message in enumerate(messages):
        core = message["content"].strip()
        is_shown = core in text if marked.names is None else not marked.names.isdisjoint((f"{i}o", f"{i}c"))
        if core and not is_shown:
            yield f"the model's chat template leaves out a message ({message['role']}): {core[:EXCERPT]!r}"
        for j, call in enumerate(message.get("tool_calls", ())):
            if marked.names is not None and f"{i}c{j}" not in marked.names and _has_text(call):
                yield f"the model's chat template leaves out a call of {call['function']['name']}"


def to_tokens(spans: Sequence[CharSpan], offsets: Sequence[tuple[int, int]]) -> tuple[PromptSpan, ...]:
    """Return character spans as token spans. A token across a border belongs to the span after it.

    One across the end of a content belongs to the content: tokenizers join a mark with the line breaks behind it.
    """
    token_starts, token_ends = ([*accumulate((offset[side] for offset in offsets), max)] for side in (0, 1))
    out = []
    for span in spans:
        start, content_start, end = (bisect_right(token_ends, at) for at in (span.start, span.content_start, span.end))
        if start < end:
            content_end = min(bisect_left(token_starts, span.content_end), end)
            out.append(PromptSpan(span.kind, start, content_start, content_end, end))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class _Place:
    """The content of message `index` at [start, end)."""

    index: int
    start: int
    end: int


def _places(count: int, marks: Mapping[str, list[int]]) -> list[_Place]:
    """Return the places of contents whose marks are in the rendering once."""
    return [place for i in range(count) if (place := _place(i, marks))]


def _place(index: int, places: Mapping[str, list[int]]) -> _Place | None:
    opened, closed = places.get(f"{index}o", []), places.get(f"{index}c", [])
    if len(opened) == len(closed) == 1 and opened[0] <= closed[0]:
        return _Place(index, opened[0], closed[0])
    return None


def absent(text: str) -> str:
    """Return a word of letters and digits that is not in the text."""
    taken = {int(number) for number in STEM.findall(text)}
    return f"Qk{next(number for number in count() if number not in taken)}zX"


def _with_marks(message: Message, mark: str) -> Message:
    """Put marks inside the white space around the content, which templates may strip, and before an argument."""
    content = message["content"]
    core = content.strip()
    if core:
        lead, trail = content[: content.index(core[0])], content[len(content.rstrip()) :]
        message = message | {"content": f"{lead}{mark}ox{core}{mark}cx{trail}"}
    if "tool_calls" not in message:
        return message
    return message | {
        "tool_calls": [_marked_call(call, f"{mark}c{j}x") for j, call in enumerate(message["tool_calls"])]
    }


def _marked_call(call: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Put a mark before the first argument that is a text."""
    function = call["function"]
    name = _first_text(call)
    arguments = {n: f"{mark}{value}" if n == name else value for n, value in function["arguments"].items()}
    return {**call, "function": {**function, "arguments": arguments}}


def _has_text(call: Mapping[str, Any]) -> bool:
    return _first_text(call) is not None


def _first_text(call: Mapping[str, Any]) -> str | None:
    return next((name for name, value in call["function"]["arguments"].items() if isinstance(value, str)), None)


def _unique(messages: Sequence[Message], text: str) -> list[_Place]:
    places = []
    for i, message in enumerate(messages):
        core = message["content"].strip()
        if len(core) >= SHORTEST_UNIQUE and text.count(core) == 1:
            start = text.index(core)
            places.append(_Place(i, start, start + len(core)))
    return places


def _in_order(places: Sequence[_Place]) -> list[_Place]:
    """Sort by place in the text and drop overlaps. Some templates move the system message."""
    out: list[_Place] = []
    for place in sorted(places, key=lambda p: (p.start, p.end)):
        if not out or place.start >= out[-1].end:
            out.append(place)
    return out


def _spans(
    messages: Sequence[Message], text: str, places: Sequence[_Place], ends: re.Pattern[str], has_tools: bool
) -> Iterator[CharSpan]:
    """Divide the template's own text between the located messages."""
    if not places:
        return
    tail = _last_cut(text, places[-1].end, len(text), ends)
    opening = text[tail:]
    start = _last_cut(text, 0, places[0].start, ends)
    if start:
        yield CharSpan("tools" if has_tools else "system", 0, 0, _marker_start(text, 0, start, ends), start)
    for place, following in pairwise([*places, None]):
        assert place is not None
        missing = _missing(messages, place, following)
        limit = following.start if following else len(text)
        end = _first_cut(text, place.end, limit, ends) if missing else _last_cut(text, place.end, limit, ends)
        first, last = _extend_by_parts(messages[place.index], text, place, start, end, opening, ends)
        message = messages[place.index]
        kind = "tools" if LOADS in message else _kind(message)  # schemas are kept in full
        yield CharSpan(kind, start, first, last, end)
        start = _last_cut(text, end, limit, ends) if missing else end
        if start > end:
            yield _gap(missing, text, end, start, opening, ends)


def _extend_by_parts(
    message: Message, text: str, place: _Place, start: int, end: int, opening: str, ends: re.Pattern[str]
) -> tuple[int, int]:
    """Extend the content by the assistant's text that templates set around it: reasoning before, tool calls after."""
    first, last = place.start, place.end
    if "reasoning" in message:
        first = start + length_in_common(text[start:first], opening)
    if "tool_calls" in message:
        last = _marker_start(text, last, end, ends)
    return first, last


def _missing(messages: Sequence[Message], place: _Place, following: _Place | None) -> list[Message]:
    """Return the messages with text between two located ones. Empty messages are all structure."""
    between = messages[place.index + 1 : following.index if following else len(messages)]
    return [m for m in between if m["content"].strip() or "tool_calls" in m or "reasoning" in m]


def _gap(missing: Sequence[Message], text: str, start: int, end: int, opening: str, ends: re.Pattern[str]) -> CharSpan:
    """Return the span of messages without text of their own, like a tool call, or with cut text, like reasoning."""
    kind = _kind(missing[0]) if len(missing) == 1 else "other"
    content_end = _marker_start(text, start, end, ends)
    header = length_in_common(text[start:content_end], opening)
    return CharSpan(kind, start, start + header, content_end, end)


def _kind(message: Message) -> SpanKind:
    return "other" if only_reminds(message) else KINDS.get(message["role"], "other")


def length_in_common(one: str, other: str) -> int:
    """Return the length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _first_cut(text: str, start: int, end: int, ends: re.Pattern[str]) -> int:
    match = ends.search(text, start, end)
    return match.end() if match else start


def _last_cut(text: str, start: int, end: int, ends: re.Pattern[str]) -> int:
    """Return the end of the last end-of-turn marker in [start, end), else `start`."""
    return max((match.end() for match in ends.finditer(text, start, end)), default=start)


def _marker_start(text: str, start: int, end: int, ends: re.Pattern[str]) -> int:
    return max((match.start() for match in ends.finditer(text, start, end)), default=end)
