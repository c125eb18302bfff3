"""Shared parts of the formats of tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from ..deltas import CallDelta, CallEnd, CallStart, ContentDelta, new_call_id
from .base import Cursor, MalformedError, Reading, Tools, Waiting, peek, skip, spaces

LONGEST_NAME = 256
FENCE = "```"
CALL, END_CALL = "<tool_call>", "</tool_call>"  # of several families

# Reads one or more calls; the cursor stands on the opening tag.
CallReader = Callable[[Cursor, Tools], Reading[None]]


def call(name: str, arguments: Reading[None], written_id: str = "") -> Reading[None]:
    """Read one call around its arguments. It opens when their text begins."""
    texts: list[str] = []
    for delta in arguments:
        if delta is not None:
            if not texts:
                yield CallStart(name, new_call_id(written_id))
            texts.append(text_of(delta))
        yield delta
    yield CallEnd("".join(texts))


def whole_call(name: str, arguments: Mapping[str, object]) -> Reading[None]:
    """Return one call whose arguments are known at once."""
    yield from call(name, emit(json.dumps(arguments, ensure_ascii=False)))


def emit(text: str) -> Reading[None]:
    """Yield arguments that are known as JSON text."""
    yield CallDelta(text)


def capture(reading: Reading[None]) -> Waiting:
    """Read arguments without yielding them."""
    texts = []
    for delta in reading:
        if delta is None:
            yield None
        else:
            texts.append(text_of(delta))
    return "".join(texts)


def until(cursor: Cursor, ends: str, never: str = "", longest: int = LONGEST_NAME) -> Reading[str]:
    """Read a name, or another short text, up to one of the characters `ends`, which is not read.

    Raises:
        MalformedError: one of `never` comes before, or none of `ends`.
    """
    for length in range(longest):
        text = yield from peek(cursor, length + 1)
        if len(text) <= length or text[length] in never:
            break
        if text[length] in ends:
            return cursor.take(length)
    raise MalformedError("the name does not end")


def declared(cursor: Cursor, names: Iterable[str], end: str) -> Reading[str]:
    """Read a name that the tool declares, whatever characters it has, and its end; "" if another name comes."""
    marks = sorted((f"{name}{end}" for name in names), key=len, reverse=True)
    return (yield from skip(cursor, *marks)).removesuffix(end)


def fence(cursor: Cursor) -> Reading[bool]:
    """Read the opening of a fence, as in documents, with its word. Return whether there is one."""
    opened = yield from skip(cursor, FENCE)
    if opened:
        yield from until(cursor, "\n{[<")
        yield from spaces(cursor)
    return bool(opened)


def expect(cursor: Cursor, mark: str) -> Reading[None]:
    """Read `mark`."""
    if not (yield from skip(cursor, mark)):
        raise MalformedError(f"{mark!r} is expected")


def text_of(delta: ContentDelta) -> str:
    assert isinstance(delta, CallDelta)  # arguments yield nothing else
    return delta.text
