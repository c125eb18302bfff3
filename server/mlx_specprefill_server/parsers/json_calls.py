"""Calls as JSON objects: Hermes, Qwen, Mistral and many others; Gemma's have keys without quotes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson

from ..deltas import CallDelta
from .base import Cursor, MalformedError, Reading, Tools, overlap, peek, spaces, starts_with
from .calls import CallReader, call, capture, convert, emit, expect, until
from .json_text import DEEPEST, JsonReader

ARGUMENTS = ("arguments", "parameters")
PYTHON_TAG = "<|python_tag|>"


def read_calls(cursor: Cursor, tools: Tools, closers: Sequence[str] = ()) -> Reading[None]:
    """Read one object, several in a row, or an array of them."""
    listed = yield from starts_with(cursor, ("[",))
    if listed:
        cursor.take(1)
    while True:
        yield from spaces(cursor)
        yield from _Call(cursor, tools, closers).read()
        yield from spaces(cursor)
        separator = yield from starts_with(cursor, (",", ";", "{"))
        if not separator:
            break
        if separator != "{":
            cursor.take(1)
    if listed and (yield from starts_with(cursor, ("]",))):
        cursor.take(1)


def read_bare(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read a call without its tag. Only a known tool with arguments is one."""
    yield from _Call(cursor, tools, (), bare=True).read()
    yield from spaces(cursor)
    if (yield from starts_with(cursor, ("</tool_call>",))):
        cursor.take(len("</tool_call>"))


def read_python_tag(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read Llama's tag, which has no end."""
    yield from expect(cursor, PYTHON_TAG)
    yield from spaces(cursor)
    yield from read_calls(cursor, tools)


class _Call:
    def __init__(self, cursor: Cursor, tools: Tools, closers: Sequence[str], bare: bool = False) -> None:
        self._cursor = cursor
        self._tools = tools
        self._closers = closers
        self._bare = bare
        self._name: str | None = None
        self._early: str | None = None  # arguments before the name
        self._called = False

    def read(self) -> Reading[None]:
        yield from expect(self._cursor, "{")
        while not (yield from self._over()):
            key = yield from JsonReader(self._cursor).text()
            yield from spaces(self._cursor)
            yield from expect(self._cursor, ":")
            yield from spaces(self._cursor)
            yield from self._member(key)
            yield from spaces(self._cursor)
            if (yield from starts_with(self._cursor, (",",))):
                self._cursor.take(1)
        if self._called:
            return
        if self._name is None or (self._bare and self._early is None):
            raise MalformedError("no call")
        yield from call(self._name, emit(self._early or "{}"))

    def _over(self) -> Reading[bool]:
        yield from spaces(self._cursor)
        if (yield from starts_with(self._cursor, ("}",))):
            self._cursor.take(1)
            return True
        return bool((yield from starts_with(self._cursor, self._closers)))

    def _member(self, key: str) -> Reading[None]:
        if key == "name" and self._name is None:
            self._name = self._tools.name((yield from JsonReader(self._cursor).text()))
            if self._bare and self._name not in self._tools.properties:
                raise MalformedError("no such tool")
        elif key in ARGUMENTS and self._name is not None and not self._called:
            self._called = True
            yield from call(self._name, self._arguments())
        elif key in ARGUMENTS and self._early is None:
            self._early = yield from capture(self._arguments())
        else:
            yield from capture(JsonReader(self._cursor).value())

    def _arguments(self) -> Reading[None]:
        """Read an object, also one inside a string, or null for none."""
        match (yield from peek(self._cursor, 1)):
            case '"':
                text = yield from JsonReader(self._cursor).text()
                inner = Cursor(text.strip() or "{}", ended=True)
                yield from JsonReader(inner).object()
                if inner.buffer:
                    raise MalformedError("more than an object")
            case "n":
                yield from expect(self._cursor, "null")
                yield CallDelta("{}")
            case _:
                yield from JsonReader(self._cursor, self._closers).object()


MISTRAL_TAG, MISTRAL_ARGUMENTS, MISTRAL_CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read_mistral_tag(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read all calls behind one mark."""
    cursor.take(len(MISTRAL_TAG))
    yield from spaces(cursor)
    if (yield from starts_with(cursor, ("[", "{"))):
        yield from read_calls(cursor, tools)
        return
    while True:
        name = tools.name((yield from until(cursor, "[{", never=' "<\n')))
        if (yield from starts_with(cursor, (MISTRAL_CALL_ID,))):
            cursor.take(len(MISTRAL_CALL_ID))
            yield from until(cursor, "[{")
        if (yield from starts_with(cursor, (MISTRAL_ARGUMENTS,))):
            cursor.take(len(MISTRAL_ARGUMENTS))
        yield from spaces(cursor)
        yield from call(name, JsonReader(cursor).object())
        yield from spaces(cursor)
        if not cursor.buffer or (yield from starts_with(cursor, (MISTRAL_TAG,))):
            return


def gemma_reader(opener: str, closer: str, quote: str) -> CallReader:
    """Return a reader of `<opener>call:name{key:value,...}<closer>`, with strings between two `quote` marks."""

    def read(cursor: Cursor, tools: Tools) -> Reading[None]:
        yield from expect(cursor, opener)
        yield from spaces(cursor)
        yield from expect(cursor, "call:")
        name = tools.name((yield from until(cursor, "{", never=' "[\n}')))
        yield from call(name, _Arguments(cursor, quote).object(0))
        yield from spaces(cursor)
        if (yield from starts_with(cursor, (closer,))):
            cursor.take(len(closer))

    return read


class _Arguments:
    """A translator of Gemma's notation to JSON as it comes. A key waits until its value begins."""

    def __init__(self, cursor: Cursor, quote: str) -> None:
        self._cursor = cursor
        self._quote = quote
        self._held = ""

    def object(self, depth: int) -> Reading[None]:
        yield from self._items(depth, "{", "}", self._member)

    def _items(self, depth: int, opens: str, closes: str, item: Callable[[int], Reading[None]]) -> Reading[None]:
        if depth > DEEPEST:
            raise MalformedError("nested too deeply")
        yield from expect(self._cursor, opens)
        self._held += opens
        first = True
        while True:
            yield from spaces(self._cursor)
            if (yield from starts_with(self._cursor, (closes,))):
                self._cursor.take(1)
                yield from self._say(closes)
                return
            self._held += "" if first else ", "
            first = False
            yield from item(depth + 1)
            yield from spaces(self._cursor)
            if (yield from starts_with(self._cursor, (",",))):
                self._cursor.take(1)
            elif not (yield from starts_with(self._cursor, (closes,))):
                raise MalformedError(f"',' or '{closes}' is expected")

    def _member(self, depth: int) -> Reading[None]:
        if (yield from starts_with(self._cursor, (self._quote,))):
            key = yield from self._quoted_key()
        elif (yield from peek(self._cursor, 1)) == '"':
            key = yield from JsonReader(self._cursor).text()
        else:
            key = (yield from until(self._cursor, ":", never='{}[]",<')).strip()
        yield from spaces(self._cursor)
        yield from expect(self._cursor, ":")
        yield from spaces(self._cursor)
        self._held += f"{orjson.dumps(key).decode()}: "
        yield from self._value(depth)

    def _quoted_key(self) -> Reading[str]:
        text = yield from capture(_Arguments(self._cursor, self._quote)._string())
        return str(orjson.loads(text))

    def _value(self, depth: int) -> Reading[None]:
        match (yield from starts_with(self._cursor, (self._quote, '"', "{", "["))):
            case "{":
                yield from self.object(depth)
            case "[":
                yield from self._items(depth, "[", "]", self._value)
            case '"':
                text = yield from JsonReader(self._cursor).text()
                yield from self._say(orjson.dumps(text).decode())
            case "":
                word = yield from until(self._cursor, ",}]", never="{[<")
                yield from self._say(convert(word.strip(), {"type": ["number", "boolean", "null"]}))
            case _:
                yield from self._string()

    def _string(self) -> Reading[None]:
        yield from expect(self._cursor, self._quote)
        yield from self._say('"')
        while True:
            at = self._cursor.buffer.find(self._quote)
            size = at if at >= 0 else len(self._cursor.buffer) - overlap(self._cursor.buffer, (self._quote,))
            yield from self._say(orjson.dumps(self._cursor.take(size)).decode()[1:-1])
            if at >= 0:
                self._cursor.take(len(self._quote))
                yield from self._say('"')
                return
            if self._cursor.ended:
                raise MalformedError("the text ends inside a string")
            yield None

    def _say(self, text: str) -> Reading[None]:
        text, self._held = self._held + text, ""
        if text:
            yield CallDelta(text)
