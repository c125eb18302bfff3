"""JSON as models write it, checked character by character and passed on as it comes; also in Gemma's notation.

A key is passed on when its value begins, so an object that is malformed at its first value has yielded nothing. White
space between the parts is that of `json.dumps`, numbers keep their digits. Unambiguous mistakes are corrected: trailing
commas, raw line breaks in strings, unknown escapes, Python's quotes, True, False and None, and missing closing brackets
before the call's end tag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence

import orjson

from ..deltas import CallDelta
from .base import Cursor, MalformedError, Reading, overlap, peek, skip, spaces, starts_with
from .call_parts import expect, until

DEEPEST = 400  # readers of JSON have limits, too: Python's lies near 1000
LONGEST_WORD = 4096  # characters of a text without marks, in Gemma's notation
CLOSING = {"{": "}", "[": "]"}
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
WORD = re.compile(r"[A-Za-z0-9+.-]*")
WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
QUOTES = ('"', "'")
NOT_PLAIN = re.compile(r"""["'\\\x00-\x1f]""")
HEX = re.compile(r"\\u[0-9A-Fa-f]{4}")
REPLACEMENT = "\\ufffd"

EndsText = Callable[[Cursor], Generator[None, None, bool]]


class JsonReader:
    """A reader of one object at the cursor.

    Args:
        closers: tags that end the call; brackets that are open before one of them are closed.
        quote: Gemma's mark around strings, which then have no escapes. Keys need no quotes, and bare words are strings.
        before: text that is passed on when the value begins.
        ends_text: returns whether the quote at the cursor ends a string that is the whole value; None: each one does.
    """

    def __init__(
        self,
        cursor: Cursor,
        closers: Sequence[str] = (),
        quote: str = "",
        before: str = "",
        ends_text: EndsText | None = None,
    ) -> None:
        self._cursor = cursor
        self._closers = closers
        self._quote = quote
        self._held = before
        self._ends_text = ends_text

    def object(self) -> Reading[None]:
        """Yield the text of an object."""
        if not (yield from starts_with(self._cursor, ("{",))):
            raise MalformedError("'{' is expected")
        yield from self.value()

    def text(self) -> Reading[str]:
        """Read a string and return its value."""
        yield from self._string()
        text, self._held = self._held, ""
        return str(orjson.loads(text))

    def value(self) -> Reading[None]:
        """Yield the text of any value. The containers around a place are kept in a list: models nest without end."""
        around: list[str] = []
        while True:
            if opens := (yield from skip(self._cursor, *CLOSING)):
                self._open(opens, around)
            else:
                yield from self._scalar(self._ends_text if not around else None)
            yield from self._between(around, bool(opens))
            if not around:
                yield from self._say("")
                return
            if around[-1] == "}":
                yield from self._key()

    def _open(self, bracket: str, around: list[str]) -> None:
        if len(around) >= DEEPEST:
            raise MalformedError("nested too deeply")
        self._held += bracket
        around.append(CLOSING[bracket])

    def _between(self, around: list[str], opened: bool) -> Reading[None]:
        """Read up to the next value of a container, or of one around it. `opened`: the first of its container."""
        while around:
            separated = opened or (yield from self._separator())
            if not (yield from self.ends(around[-1])):
                if not separated:
                    raise MalformedError(f"',' or '{around[-1]}' is expected")
                self._held += "" if opened else ", "
                return
            yield from self._say(around.pop())
            opened = False

    def _separator(self) -> Reading[bool]:
        yield from spaces(self._cursor)
        return bool((yield from skip(self._cursor, ",")))

    def _scalar(self, ends_text: EndsText | None) -> Reading[None]:
        if self._quote and (yield from starts_with(self._cursor, (self._quote,))):
            yield from self._marked_string(live=True)
        elif (yield from peek(self._cursor, 1)) in QUOTES:
            yield from self._string(live=True, ends_text=ends_text)
        elif self._quote:
            word = yield from self._signs()
            word = (word + (yield from until(self._cursor, ",}]", "{[<", LONGEST_WORD))).strip()
            number = NUMBER.fullmatch(word)
            yield from self._say(word if number else WORDS.get(word) or orjson.dumps(word).decode())
        else:
            yield from self._word()

    def ends(self, bracket: str) -> Reading[bool]:
        """Return whether the container ends here, by its bracket or the call's end tag."""
        yield from spaces(self._cursor)
        return bool((yield from skip(self._cursor, bracket)) or (yield from starts_with(self._cursor, self._closers)))

    def _key(self) -> Reading[None]:
        if self._quote and (yield from starts_with(self._cursor, (self._quote,))):
            yield from self._marked_string()
        elif self._quote and (yield from peek(self._cursor, 1)) not in QUOTES:
            key = yield from until(self._cursor, ":", never='{}",<')
            if key[:1] in ("", "[", "]"):
                raise MalformedError("a name is expected")
            self._held += orjson.dumps(key.strip()).decode()
        else:
            yield from self._string()
        yield from spaces(self._cursor)
        yield from expect(self._cursor, ":")
        yield from spaces(self._cursor)
        self._held += ": "

    def _string(self, live: bool = False, ends_text: EndsText | None = None) -> Reading[None]:
        """Read a string. A `live` string is passed on as it comes."""
        quote = yield from skip(self._cursor, *QUOTES)
        if not quote:
            raise MalformedError("a string is expected")
        self._held += '"'
        while True:
            special = NOT_PLAIN.search(self._cursor.buffer)
            self._held += self._cursor.take(special.start() if special else len(self._cursor.buffer))
            if live:
                yield from self._say("")
            if special is None:
                yield from self._more()
            elif special[0] == quote and (ends_text is None or (yield from ends_text(self._cursor))):
                self._cursor.take(1)
                self._held += '"'
                return
            elif special[0] == "'":
                self._held += self._cursor.take(1)
            elif special[0] == "\\":
                self._held += yield from self._escape()
            else:
                self._held += orjson.dumps(self._cursor.take(1)).decode()[1:-1]

    def _marked_string(self, live: bool = False) -> Reading[None]:
        """Read a string between two marks, as `_string`."""
        yield from expect(self._cursor, self._quote)
        self._held += '"'
        while (at := self._cursor.buffer.find(self._quote)) < 0:
            self._hold_text(len(self._cursor.buffer) - overlap(self._cursor.buffer, (self._quote,)))
            if live:
                yield from self._say("")
            yield from self._more()
        self._hold_text(at)
        self._cursor.take(len(self._quote))
        self._held += '"'

    def _hold_text(self, size: int) -> None:
        self._held += orjson.dumps(self._cursor.take(size)).decode()[1:-1]

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
        word = yield from self._signs()
        if NUMBER.fullmatch(word):
            yield from self._say(word)
        elif word in WORDS:
            yield from self._say(WORDS[word])
        else:
            raise MalformedError(f"not a value: {word[:20]!r}")

    def _signs(self) -> Reading[str]:
        """Read the letters, digits and signs at the cursor, however many."""
        word = ""
        while True:
            part = WORD.match(self._cursor.buffer)
            word += self._cursor.take(part.end() if part else 0)
            if self._cursor.buffer or self._cursor.ended:
                return word
            yield None

    def _say(self, text: str) -> Reading[None]:
        text, self._held = self._held + text, ""
        if text:
            yield CallDelta(text)

    def _more(self) -> Reading[None]:
        if self._cursor.ended:
            raise MalformedError("the text ends inside a string")
        yield None
