"""Values without quotes, between tags. The tool's schema says what is text and what is JSON."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence

import orjson

from ..big_json import is_too_deep
from ..deltas import CallDelta
from ..schemas import TYPES, Place
from .base import Cursor, MalformedError, Reading, ahead, find_first, past_spaces, peek, starts_with
from .call_parts import capture, text_of
from .json_text import JsonReader

# The marks that end a value, each with the texts of which one must follow; none: any.
Ends = Mapping[str, Sequence[str]]

ANYTHING = Place()
BEGINS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
INTEGER = re.compile(r"-?\d+", re.ASCII)
ZEROS = re.compile(r"\A(-?)0+(?=\d)", re.ASCII)
MOST_EXACT = 2**53  # larger whole numbers with a point or an exponent stay as they are written


def convert(text: str, place: Place) -> str:
    """Return the value as JSON text, its numbers with the digits that were written. A value that does not fit its place
    stays a string: the tool's check names the fault.
    """
    written = "" if place.texts and text in place.texts else _as_json(text.strip())
    if not written and "string" not in place.types:  # a month 07
        written = _as_json(ZEROS.sub(r"\1", text.strip()))
    return (_fitting(written, place) if written else "") or _dump(text)


def literal(text: str, place: Place) -> str:
    """Return a value that stands without quotes where texts have some, as JSON text."""
    return _as_json(text) or convert(text, place)


def _fitting(written: str, place: Place) -> str:
    """Return JSON text that fits, "" if it is meant as text."""
    kind = BEGINS.get(written[0]) or ("integer" if INTEGER.fullmatch(written) else "number")
    if place.open:  # a value of unknown type stays text unless it can hardly be meant as text
        return written if kind in ("object", "array") else ""
    if "string" in place.types and place.texts is None and kind != "null":
        return ""
    if kind in place.types:
        return written
    if kind == "number" and "integer" in place.types:
        value = float(written)
        return str(int(value)) if value.is_integer() and abs(value) < MOST_EXACT else ""
    return ""


def _as_json(text: str) -> str:
    """Return text that is JSON, as it is or without a model's slips; "" if it is none."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return _mended(text)
    return _mended(text) if is_too_deep(value) else text


def _mended(text: str) -> str:
    cursor = Cursor(text, ended=True)
    try:
        mended = "".join(text_of(part) for part in JsonReader(cursor).value() if part is not None)
    except MalformedError:
        return ""
    return "" if cursor.buffer else mended


def _dump(text: str) -> str:
    return orjson.dumps(text).decode()


class Members:
    """A writer of `"name": value` pairs as one JSON object while their values are still being generated."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places
        self._before = "{"

    def add(self, name: str, value: Value, types: frozenset[str] = TYPES) -> Reading[None]:
        """Add one pair. Text is passed on as it comes, other types when they are complete.

        Args:
            types: the types that the model says the value has. Where they contradict the schema, the schema holds.
        """
        place = self._places.get(name, ANYTHING)
        if types := types & place.types:
            place = Place(types, place.texts if "string" in types else None)
        head = f"{self._before}{_dump(name)}: "
        self._before = ", "
        if place.types == {"string"}:
            yield CallDelta(head + '"')
            for part in value.read():
                yield None if part is None else CallDelta(_dump(part)[1:-1])
            yield CallDelta('"')
            return
        text = ""
        for part in value.read(may_be_json="string" not in place.types or place.texts is not None):
            text += part or ""
            if part is None:
                yield None
        yield CallDelta(head + convert(text, place))

    def close(self) -> Reading[None]:
        yield CallDelta("{}" if self._before == "{" else "}")


class Value:
    """A value between tags, without quotes.

    Args:
        closer: its end tag, "" for none.
        ends: the tags that end it, this one and others, each only before one of its texts or the end of the text: a
            value may be a text about these very tags.
        lines: one line break after the opening and one before the end tag are not part of the value.
    """

    def __init__(self, cursor: Cursor, closer: str, ends: Ends, lines: bool = False) -> None:
        self._cursor = cursor
        self._closer = closer
        self._ends = ends
        self._lines = lines

    def read(self, may_be_json: bool = False) -> Generator[str | None, None, None]:
        """Yield its parts up to the end tag, which is read, or up to another one. In JSON, texts hold whatever tags."""
        if self._lines and (yield from peek(self._cursor, 1)) == "\n":
            self._cursor.take(1)
        if may_be_json and (yield from starts_with(self._cursor, ("{", "["))):
            before = self._cursor.mark()
            try:
                yield from capture(JsonReader(self._cursor).value())
            except MalformedError:
                self._cursor.rewind(0)
            yield self._cursor.unmark(before)
        while True:
            at, mark = self._next()
            if at:
                yield self._cursor.take(at)
            if not mark:
                if self._cursor.ended:
                    raise MalformedError("the text ends inside a value")
                yield None
            elif (yield from self._is_end(mark)):
                return
            else:
                yield self._cursor.take(1)

    def _next(self) -> tuple[int, str]:
        """Return how many characters certainly belong to the value, and the tag that follows them, or ""."""
        text = self._cursor.buffer
        at, mark = find_first(text, self._ends)
        return at - (self._lines and text[:at].endswith("\n")), mark

    def _is_end(self, mark: str) -> Generator[None, None, bool]:
        """Return whether the tag at the cursor, perhaps after one line break, ends the value."""
        line = 0 if self._cursor.buffer.startswith(mark) else 1
        past = yield from past_spaces(self._cursor, line + len(mark))
        follower = yield from ahead(self._cursor, past, self._ends[mark])
        is_end = bool(follower) or (self._cursor.complete and len(self._cursor.buffer) <= past)
        self._cursor.take((line + len(mark) * (mark == self._closer)) * is_end)
        return is_end
