"""Calls with keys without quotes and strings between marks of their own: Gemma 4 and FunctionGemma."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from ..deltas import CallDelta
from .base import Cursor, MalformedError, Reading, Tools, overlap, peek, spaces, starts_with
from .calls import CallReader, call, captured, convert, expect, until
from .json_text import DEEPEST, JsonReader

__all__ = ["reader"]


def reader(opener: str, closer: str, quote: str) -> CallReader:
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
        text = yield from captured(_Arguments(self._cursor, self._quote)._string())
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
