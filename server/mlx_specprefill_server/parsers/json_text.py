"""JSON as models write it, checked character by character and passed on as it comes.

A key is passed on when its value begins, so an object that is malformed at its first value has yielded nothing.
Unambiguous mistakes are corrected: trailing commas, raw line breaks in strings, unknown escapes, Python's True, False
and None, and missing closing brackets before the call's end tag.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import orjson

from ..deltas import CallDelta
from .base import Cursor, MalformedError, Reading, peek, spaces, starts_with

DEEPEST = 64
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
WORD = re.compile(r"[A-Za-z0-9+.-]*")
WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
NOT_PLAIN = re.compile(r'["\\\x00-\x1f]')
HEX = re.compile(r"\\u[0-9A-Fa-f]{4}")
REPLACEMENT = "\\ufffd"


class JsonReader:
    """A reader of one object at the cursor.

    Args:
        closers: tags that end the call; brackets that are open before one of them are closed.
    """

    def __init__(self, cursor: Cursor, closers: Sequence[str] = ()) -> None:
        self._cursor = cursor
        self._closers = closers
        self._held = ""

    def object(self, depth: int = 0) -> Reading[None]:
        """Yield the object's text.

        Raises:
            MalformedError: this is not an object.
        """
        yield from self._expect("{")
        comma = ""
        while not (yield from self._over("}", comma)):
            yield from self._string()
            yield from self._space()
            yield from self._expect(":")
            yield from self._space()
            yield from self.value(depth + 1)
            comma = yield from self._comma("}")
        yield from self._say("}")

    def text(self) -> Reading[str]:
        """Read a string and return its value.

        Raises:
            MalformedError: this is not a string.
        """
        yield from self._string()
        text, self._held = self._held, ""
        return str(orjson.loads(text))

    def _array(self, depth: int) -> Reading[None]:
        yield from self._expect("[")
        comma = ""
        while not (yield from self._over("]", comma)):
            yield from self.value(depth + 1)
            comma = yield from self._comma("]")
        yield from self._say("]")

    def value(self, depth: int = 0) -> Reading[None]:
        """Yield the text of any value."""
        if depth > DEEPEST:
            raise MalformedError("nested too deeply")
        match (yield from peek(self._cursor, 1)):
            case "{":
                yield from self.object(depth)
            case "[":
                yield from self._array(depth)
            case '"':
                yield from self._string(live=True)
            case _:
                yield from self._word()

    def _over(self, bracket: str, comma: str) -> Reading[bool]:
        """Return whether the container ends here, by its bracket or the call's end tag. A value must follow a comma."""
        space = yield from spaces(self._cursor)
        if (yield from starts_with(self._cursor, (bracket,))):
            self._cursor.take(1)
        elif not (yield from starts_with(self._cursor, self._closers)):
            self._held += comma + space
            return False
        self._held += space
        return True

    def _comma(self, bracket: str) -> Reading[str]:
        """Read a comma, if there is one."""
        space = yield from spaces(self._cursor)
        if (yield from starts_with(self._cursor, (",",))):
            return space + self._cursor.take(1)
        self._held += space
        if not (yield from starts_with(self._cursor, (bracket, *self._closers))):
            raise MalformedError(f"',' or '{bracket}' is expected")
        return ""

    def _string(self, live: bool = False) -> Reading[None]:
        """Read a string. A `live` string is passed on as it comes."""
        yield from self._expect('"')
        while True:
            special = NOT_PLAIN.search(self._cursor.buffer)
            self._held += self._cursor.take(special.start() if special else len(self._cursor.buffer))
            if live:
                yield from self._say("")
            if special is None:
                yield from self._more()
            elif special[0] == '"':
                self._held += self._cursor.take(1)
                return
            elif special[0] == "\\":
                self._held += yield from self._escape()
            else:
                self._held += orjson.dumps(self._cursor.take(1)).decode()[1:-1]

    def _escape(self) -> Reading[str]:
        pair = yield from peek(self._cursor, 2)
        if len(pair) < 2:
            raise MalformedError("the text ends inside a string")
        if pair == "\\u":
            return (yield from self._code())
        if pair[1] in '"\\/bfnrt':
            return self._cursor.take(2)
        if pair[1] == "'":
            self._cursor.take(2)
            return "'"
        self._cursor.take(1)
        return "\\\\"

    def _code(self) -> Reading[str]:
        r"""Read \uXXXX. Half a surrogate pair stands for no character."""
        code = yield from peek(self._cursor, 6)
        if not HEX.fullmatch(code):
            self._cursor.take(1)
            return "\\\\"
        if not 0xD800 <= int(code[2:], 16) < 0xE000:
            return self._cursor.take(6)
        pair = yield from peek(self._cursor, 12)
        if code[3] in "89abAB" and HEX.fullmatch(pair[6:]) and pair[8:9] in ("d", "D") and pair[9] in "cdefCDEF":
            return self._cursor.take(12)
        self._cursor.take(6)
        return REPLACEMENT

    def _word(self) -> Reading[None]:
        """Read a number or a literal. Both end where something else begins."""
        word = ""
        while True:
            part = WORD.match(self._cursor.buffer)
            word += self._cursor.take(part.end() if part else 0)
            if self._cursor.buffer or self._cursor.ended:
                break
            yield None
        if NUMBER.fullmatch(word) and math.isfinite(float(word)):
            yield from self._say(word)
        elif word in WORDS:
            yield from self._say(WORDS[word])
        else:
            raise MalformedError(f"not a value: {word[:20]!r}")

    def _say(self, text: str) -> Reading[None]:
        text, self._held = self._held + text, ""
        if text:
            yield CallDelta(text)

    def _space(self) -> Reading[None]:
        self._held += yield from spaces(self._cursor)

    def _expect(self, char: str) -> Reading[None]:
        if not (yield from starts_with(self._cursor, (char,))):
            raise MalformedError(f"{char!r} is expected")
        self._held += self._cursor.take(1)

    def _more(self) -> Reading[None]:
        if self._cursor.ended:
            raise MalformedError("the text ends inside a string")
        yield None
