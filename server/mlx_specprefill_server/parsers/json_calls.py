"""Calls as JSON objects: Hermes, Qwen, Mistral and many others; Gemma's have keys without quotes."""

from __future__ import annotations

from collections.abc import Sequence

from ..deltas import CallDelta
from ..notations import MISTRAL_ARGUMENTS, MISTRAL_CALL_ID, MISTRAL_TAG
from .base import Cursor, MalformedError, Reading, Tools, peek, skip, spaces, starts_with
from .calls import CallReader, call, capture, emit, expect, until
from .json_text import JsonReader

ARGUMENTS = ("arguments", "parameters")
PYTHON_TAG = "<|python_tag|>"


def read_calls(cursor: Cursor, tools: Tools, closers: Sequence[str] = ()) -> Reading[None]:
    """Read one object, several in a row, or an array of them."""
    listed = yield from skip(cursor, "[")
    while True:
        yield from spaces(cursor)
        yield from _Call(cursor, tools, closers).read()
        yield from spaces(cursor)
        if not (yield from skip(cursor, ",", ";")) and not (yield from starts_with(cursor, ("{",))):
            break
    if listed:
        yield from skip(cursor, "]")


def read_bare(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read a call without its tag. Only a known tool with arguments is one."""
    yield from _Call(cursor, tools, (), bare=True).read()
    yield from spaces(cursor)
    yield from skip(cursor, "</tool_call>")


def read_python_tag(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read Llama's tag, which has no end."""
    yield from expect(cursor, PYTHON_TAG)
    yield from spaces(cursor)
    yield from read_calls(cursor, tools)


class _Call:
    def __init__(self, cursor: Cursor, tools: Tools, closers: Sequence[str], bare: bool = False) -> None:
        self._cursor = cursor
        self._tools = tools
        self._reader = JsonReader(cursor, closers)
        self._bare = bare
        self._name: str | None = None
        self._early: str | None = None  # arguments before the name
        self._called = False

    def read(self) -> Reading[None]:
        yield from expect(self._cursor, "{")
        while not (yield from self._reader.ends("}")):
            key = yield from self._reader.text()
            yield from spaces(self._cursor)
            yield from expect(self._cursor, ":")
            yield from spaces(self._cursor)
            yield from self._member(key)
            yield from spaces(self._cursor)
            yield from skip(self._cursor, ",")
        if self._called:
            return
        if self._name is None or (self._bare and self._early is None):
            raise MalformedError("no call")
        yield from call(self._name, emit(self._early or "{}"))

    def _member(self, key: str) -> Reading[None]:
        if key == "name" and self._name is None:
            self._name = self._tools.name((yield from self._reader.text()))
            if self._bare and self._name not in self._tools:
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
                text = yield from self._reader.text()
                inner = Cursor(text.strip() or "{}", ended=True)
                yield from JsonReader(inner).object()
                if inner.buffer:
                    raise MalformedError("more than an object")
            case "n":
                yield from expect(self._cursor, "null")
                yield CallDelta("{}")
            case _:
                yield from self._reader.object()


def read_mistral_tag(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read all calls behind one mark."""
    cursor.take(len(MISTRAL_TAG))
    yield from spaces(cursor)
    if (yield from starts_with(cursor, ("[", "{"))):
        yield from read_calls(cursor, tools)
        return
    while True:
        name = tools.name((yield from until(cursor, "[{", never=' "<\n')))
        if (yield from skip(cursor, MISTRAL_CALL_ID)):
            yield from until(cursor, "[{")
        yield from skip(cursor, MISTRAL_ARGUMENTS)
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
        yield from call(name, JsonReader(cursor, quote=quote).object())
        yield from spaces(cursor)
        yield from skip(cursor, closer)

    return read
