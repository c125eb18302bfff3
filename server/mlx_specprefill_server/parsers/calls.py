"""Shared parts of the formats of tool calls. Unquoted values are typed by the tool's JSON schema."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from ..deltas import CallDelta, CallEnd, CallStart, ContentDelta
from ..nesting import loads
from .base import Cursor, MalformedError, Reading, Tools, ahead, find_first, peek, skip

KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
NOT_PYTHON = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
NOT_JSON = object()


def convert(text: str, schema: Any) -> str:
    """Return the value as JSON text. A value that does not fit the schema stays a string: the tool's check names the
    fault.
    """
    types = _types(schema)
    value = _parse(text.strip())
    if value is NOT_JSON:
        return _dump(text)
    kind = _kind(value)
    if "string" in types and kind != "null":
        return _dump(text)
    if not types:  # unknown type: a value stays text unless it can hardly be meant as text
        return _dump(value if kind in ("object", "array") else text)
    if kind == "number" and value == int(value) and "number" not in types and "integer" in types:
        return _dump(int(value))
    fits = kind in types or (kind == "integer" and "number" in types)
    return _dump(value if fits else text)


def _types(schema: Any, depth: int = 8) -> set[str]:
    """Return the JSON types that a schema allows; empty means unknown."""
    if not isinstance(schema, dict) or not depth:
        return set()
    stated = schema.get("type")
    if isinstance(stated, str):
        return {stated}
    if isinstance(stated, list):
        return {name for name in stated if isinstance(name, str)}
    if isinstance(schema.get("enum"), list):
        return {_kind(value) for value in schema["enum"]}
    if "const" in schema:
        return {_kind(schema["const"])}
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            branches = [_types(branch, depth - 1) for branch in schema[name]]
            return set().union(*branches) if all(branches) else set()
    return set()


def _kind(value: Any) -> str:
    return KINDS.get(type(value), "null")


def _parse(text: str) -> Any:
    """Parse JSON, or a Python literal, which models sometimes write."""
    try:
        return loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        value = ast.literal_eval(text)
        orjson.dumps(value)
    except NOT_PYTHON:
        return NOT_JSON
    return value if type(value) in KINDS or value is None else NOT_JSON


def _dump(value: Any) -> str:
    return orjson.dumps(value).decode()


LONGEST_NAME = 256

# Reads one or more calls; the cursor stands on the opening tag.
CallReader = Callable[[Cursor, Tools], Reading[None]]


def call(name: str, arguments: Reading[None]) -> Reading[None]:
    """Read one call around its arguments. It opens when their text begins."""
    texts: list[str] = []
    for delta in arguments:
        if delta is not None:
            if not texts:
                yield CallStart(name)
            texts.append(_text(delta))
        yield delta
    yield CallEnd("".join(texts))


def whole_call(name: str, arguments: Mapping[str, object]) -> Reading[None]:
    """Return one call whose arguments are known at once."""
    yield from call(name, emit(orjson.dumps(arguments).decode()))


def emit(text: str) -> Reading[None]:
    """Yield arguments that are known as JSON text."""
    yield CallDelta(text)


def capture(reading: Reading[None]) -> Reading[str]:
    """Read arguments without yielding them."""
    texts = []
    for delta in reading:
        if delta is None:
            yield None
        else:
            texts.append(_text(delta))
    return "".join(texts)


def until(cursor: Cursor, ends: str, never: str = "") -> Reading[str]:
    """Read a name up to one of the characters `ends`, which is not read.

    Raises:
        MalformedError: one of `never` comes before, or none of `ends`.
    """
    for length in range(LONGEST_NAME):
        text = yield from peek(cursor, length + 1)
        if len(text) <= length or text[length] in never:
            break
        if text[length] in ends:
            return cursor.take(length)
    raise MalformedError("the name does not end")


def expect(cursor: Cursor, mark: str) -> Reading[None]:
    """Read `mark`."""
    if not (yield from skip(cursor, mark)):
        raise MalformedError(f"{mark!r} is expected")


class Members:
    """A writer of `"name": value` pairs as one JSON object while their values are still being generated."""

    def __init__(self, tools: Tools, tool: str) -> None:
        self._schemas = tools.properties.get(tool, {})
        self._before = "{"

    def add(self, name: str, value: Value) -> Reading[None]:
        """Add one pair. Text is passed on as it comes, other types when they are complete."""
        schema = self._schemas.get(name)
        head = f"{self._before}{orjson.dumps(name).decode()}: "
        self._before = ", "
        if _types(schema) == {"string"}:
            yield CallDelta(head + '"')
            yield from value.read(_escape)
            yield CallDelta('"')
            return
        texts: list[str] = []
        yield from value.read(texts.append)
        yield CallDelta(head + convert("".join(texts), schema))

    def close(self) -> Reading[None]:
        yield CallDelta("{}" if self._before == "{" else "}")


def _escape(text: str) -> CallDelta:
    return CallDelta(orjson.dumps(text).decode()[1:-1])


class Value:
    """A value between tags, without quotes.

    Args:
        closer: its end tag. It ends the value only before one of `followers` or the end of the text: a value may be
            a text about these very tags.
        others: tags that end a value without an end tag, each with the text that must follow; None: any text.
        lines: one line break after the opening and one before the end tag are not part of the value.
    """

    def __init__(
        self,
        cursor: Cursor,
        closer: str,
        followers: Sequence[str],
        others: Mapping[str, Sequence[str] | None] | None = None,
        lines: bool = False,
    ) -> None:
        self._cursor = cursor
        self._closer = closer
        self._marks: dict[str, Sequence[str] | None] = {closer: followers, **(others or {})}
        self._lines = lines

    def read(self, emit: Callable[[str], CallDelta | None]) -> Reading[None]:
        """Read up to and including the end tag. Any other tag that ends the value is not read."""
        if self._lines and (yield from peek(self._cursor, 1)) == "\n":
            self._cursor.take(1)
        while True:
            at, mark = self._next()
            if at:
                yield from _if_any(emit(self._cursor.take(at)))
            if not mark:
                if self._cursor.ended:
                    raise MalformedError("the text ends inside a value")
                yield None
            elif (yield from self._ends(mark)):
                return
            else:
                yield from _if_any(emit(self._cursor.take(1)))

    def _next(self) -> tuple[int, str]:
        """Return how many characters certainly belong to the value, and the tag that follows them, or ""."""
        text = self._cursor.buffer
        at, mark = find_first(text, self._marks)
        return at - (self._lines and text[:at].endswith("\n")), mark

    def _ends(self, mark: str) -> Reading[bool]:
        """Return whether the tag at the cursor, perhaps after one line break, ends the value."""
        line = 0 if self._cursor.buffer.startswith(mark) else 1
        if not (yield from self._follows(line + len(mark), self._marks[mark])):
            return False
        self._cursor.take(line + len(mark) * (mark == self._closer))
        return True

    def _follows(self, at: int, followers: Sequence[str] | None) -> Reading[bool]:
        if followers is None:
            return True
        past = yield from self._past_spaces(at)
        follower = yield from ahead(self._cursor, past, followers)
        return bool(follower) or (self._cursor.complete and len(self._cursor.buffer) <= past)

    def _past_spaces(self, at: int) -> Reading[int]:
        while True:
            text = self._cursor.buffer
            past = len(text) - len(text[at:].lstrip())
            if past < len(text) or self._cursor.ended:
                return past
            yield None


def _if_any(delta: CallDelta | None) -> Reading[None]:
    if delta is not None:
        yield delta


def _text(delta: ContentDelta) -> str:
    assert isinstance(delta, CallDelta)  # arguments yield nothing else
    return delta.text
