"""Calls as JSON objects: Hermes, Qwen, Mistral and many others.

Some families' marks stand around calls in Python, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..deltas import CallDelta, CallEnd
from .base import Cursor, MalformedError, Reading, Tools, ahead, past_spaces, peek, skip, spaces, starts_with
from .call_parts import END_CALL, FENCE, CallReader, call, capture, emit, expect, fence
from .json_text import JsonReader
from .python_calls import read_python_calls

NAMES, ARGUMENTS = ("name", "tool_name", "function"), ("arguments", "parameters")
OUTSIDE = ("function", "tool_calls")  # keys of calls inside an object
MOST_OUTSIDE = 2  # objects around a call: {"tool_calls": [{"function": {...}}]}


def read_calls(
    cursor: Cursor,
    tools: Tools,
    closers: Sequence[str] = (),
    *,
    known: bool = False,
    bare: bool = False,
    outside: int = 0,
) -> Reading[None]:
    """Read one object, several in a row, or an array of them.

    Args:
        known: only a known tool is called.
        bare: there is no tag. Only a known tool with arguments is called.
        outside: the number of objects that they stand in.
    """
    listed = yield from skip(cursor, "[")
    yield from spaces(cursor)
    yield from _Call(cursor, tools, closers, known, bare, outside).read()
    while (yield from _goes_on(cursor, (*closers, "]") if listed else closers)):
        yield from _Call(cursor, tools, closers, known, bare, outside).read()
    if listed:
        yield from skip(cursor, "]")


def read_bare(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read calls without their tag, as JSON or as a list in Python."""
    if (yield from _is_json(cursor)):
        yield from read_calls(cursor, tools, bare=True)
        yield from skip(cursor, END_CALL)
    else:
        yield from read_python_calls(cursor, tools, known=True)


def between_reader(begin: str, end: str, *, known: bool = False, python: bool = False) -> CallReader:
    """Return a reader of calls between two marks, also in a fence. The end mark may be missing.

    Args:
        known: only a known tool is called.
        python: they may also be written as in Python.
    """

    def read(cursor: Cursor, tools: Tools) -> Reading[None]:
        yield from expect(cursor, begin)
        yield from spaces(cursor)
        fenced = yield from fence(cursor)
        closers = [*([FENCE] if fenced else []), *([end] if end else [])]
        if python and not (yield from _is_json(cursor)):
            yield from read_python_calls(cursor, tools, known)
        else:
            yield from read_calls(cursor, tools, closers, known=known)
        for closer in closers:
            yield from spaces(cursor)
            yield from skip(cursor, closer)

    return read


def _is_json(cursor: Cursor) -> Reading[bool]:
    listed = yield from starts_with(cursor, ("[",))
    at = (yield from past_spaces(cursor, 1)) if listed else 0
    return bool((yield from ahead(cursor, at, ("{",))))


def _goes_on(cursor: Cursor, closers: Sequence[str] = ()) -> Reading[bool]:
    """Return whether a further object follows. A separator before it, or before what ends the calls, is read."""
    yield from spaces(cursor)
    separator = yield from starts_with(cursor, (",", ";"))
    at = yield from past_spaces(cursor, len(separator))
    follows = yield from ahead(cursor, at, ("{", *closers))
    if follows or (cursor.complete and len(cursor.buffer) <= at):
        cursor.take(at)
    return follows == "{"


class _Call:
    def __init__(
        self, cursor: Cursor, tools: Tools, closers: Sequence[str], known: bool, bare: bool, outside: int
    ) -> None:
        self._cursor = cursor
        self._tools = tools
        self._closers = closers
        self._reader = JsonReader(cursor, closers)
        self._known = known
        self._bare = bare
        self._outside = outside
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
            for delta in self._member(key):
                closed = isinstance(delta, CallEnd) and (yield from self._closes())
                yield delta
                if closed:
                    return
            yield from spaces(self._cursor)
            yield from skip(self._cursor, ",")
        if self._called:
            return
        if self._name is None or (self._bare and self._early is None):
            raise MalformedError("no call")
        yield from call(self._name, emit(self._early or "{}"))

    def _closes(self) -> Reading[bool]:
        """Return whether the object ends. What is behind a whole call is text if it is no further one."""
        yield from spaces(self._cursor)
        return bool((yield from skip(self._cursor, "}")))

    def _member(self, key: str) -> Reading[None]:
        if key in OUTSIDE and self._name is None and (yield from starts_with(self._cursor, ("{", "["))):
            yield from self._inside()
        elif key in NAMES and self._name is None:
            yield from self._read_name()
        elif key in ARGUMENTS and self._name is not None and not self._called:
            self._called = True
            yield from call(self._name, self._arguments())
        elif key in ARGUMENTS and self._early is None:
            self._early = yield from capture(self._arguments())
        elif key in self._tools and self._name is None and not self._bare:  # Apertus
            self._name, self._called = key, True
            yield from call(key, self._arguments())
        else:
            yield from capture(JsonReader(self._cursor).value())

    def _read_name(self) -> Reading[None]:
        self._name = self._tools.name((yield from self._reader.text()))
        if (self._known or self._bare) and self._name not in self._tools:
            raise MalformedError("no such tool")

    def _inside(self) -> Reading[None]:
        """Read calls inside an object, as OpenAI's clients and xLAM have them."""
        if self._outside == MOST_OUTSIDE:
            raise MalformedError("nested too deeply")
        self._called = True
        known = {"known": self._known, "bare": self._bare}
        yield from read_calls(self._cursor, self._tools, self._closers, outside=self._outside + 1, **known)

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
