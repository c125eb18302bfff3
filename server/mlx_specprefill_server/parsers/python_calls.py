"""Calls written as in Python: [f(x=1, y="text")]. LFM2, Llama 3.2 and 4, OLMo 3.

Some templates show strings without quotes, and models forget to escape quotes within strings. So in a list a value ends
only where the list goes on.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping
from functools import partial

import orjson

from ..deltas import CallDelta
from ..schemas import Place
from .base import Cursor, MalformedError, Reading, Tools, ahead, past_spaces, peek, skip, spaces, starts_with
from .call_parts import call, declared, expect, until
from .json_text import LONGEST_WORD, NUMBER, QUOTES, WORDS, JsonReader
from .values import ANYTHING, Value, literal

NOT_IN_NAMES = "()[]{}\"',\n"
OPENS = ("[", "{")
END = ("", ",", ")")  # of a value
# What follows a quote that ends a string in a list: the end of the call, or the next name; and what may become that.
GOES_ON = re.compile(r"\s*(?:\)\s*(?:[\],]|<\|)|,\s*\)|(?:,\s*)?[\w.-]+\s*=(?!=))")
UNDECIDED = re.compile(r"\s*(?:\)\s*<?|,\s*|(?:,\s*)?[\w.-]{1,256}\s*=?)?\Z")
WORD = re.compile(r"(-?[0-9]+(?![\w+.-])|[\w+.-]{0,4096})\s{0,64}")
PLAIN_NAME = re.compile(r"[\w.-]+")  # which `GOES_ON` knows
AMBIGUOUS = re.compile(r",\s*[\w.-]+\s*=")  # in a text without quotes
METHOD = ".call"  # of Llama 3's own tools


def read_python_calls(cursor: Cursor, tools: Tools, known: bool) -> Reading[None]:
    """Read calls, in a list or one behind another; with `known` of known tools only."""
    listed = yield from skip(cursor, "[")
    goes_on = True
    while goes_on:
        yield from spaces(cursor)
        raw = (yield from until(cursor, "(", never=NOT_IN_NAMES[1:])).strip()
        name = tools.name(raw if raw in tools else raw.removesuffix(METHOD))
        if known and name not in tools:
            raise MalformedError("no such tool")
        yield from call(name, _arguments(cursor, tools.places(name), bool(listed)))
        yield from spaces(cursor)
        goes_on = bool((yield from skip(cursor, ","))) or not (listed or (yield from _ends(cursor)))
    if listed:
        yield from skip(cursor, "]")


def _ends(cursor: Cursor) -> Reading[bool]:
    """Return whether no further name begins here."""
    return not (yield from peek(cursor, 1)).isidentifier()


def _arguments(cursor: Cursor, known: Mapping[str, Place], listed: bool) -> Reading[None]:
    yield from expect(cursor, "(")
    before = "{"
    while not (yield from JsonReader(cursor).ends(")")):
        name = yield from declared(cursor, known, "=")
        if not name:
            name = (yield from until(cursor, "=", never=NOT_IN_NAMES)).strip()
            yield from expect(cursor, "=")
        yield from spaces(cursor)
        yield from _value(cursor, f"{before}{orjson.dumps(name).decode()}: ", known, known.get(name, ANYTHING), listed)
        before = ", "
        yield from spaces(cursor)
        if not (yield from skip(cursor, ",")) and not (yield from starts_with(cursor, (")",))):
            raise MalformedError("',' or ')' is expected")
    yield CallDelta("{}" if before == "{" else "}")


def _value(cursor: Cursor, before: str, known: Mapping[str, Place], place: Place, listed: bool) -> Reading[None]:
    """Read one value. `before` is passed on when it begins."""
    if not listed or (yield from starts_with(cursor, (*QUOTES, *OPENS))) or (yield from _is_word(cursor)):
        yield from JsonReader(cursor, before=before, ends_text=partial(_text_ends, known) if listed else None).value()
        return
    text = ""
    ends = {")": ("]", ","), ",": (")", *(f"{name}=" for name in known))}
    for part in Value(cursor, "", ends).read():
        text += part or ""
        if len(text) > LONGEST_WORD:
            raise MalformedError("no end of a text without quotes")
        if part is None:
            yield None
    text = text.strip()
    if not text or text.count("(") != text.count(")") or AMBIGUOUS.search(text):
        raise MalformedError(f"not a value: {text[:20]!r}")
    yield CallDelta(before + literal(text, place))


def _is_word(cursor: Cursor) -> Generator[None, None, bool]:
    """Return whether a number or a literal stands alone at the cursor."""
    while WORD.fullmatch(cursor.buffer) and not cursor.ended:
        yield
    found = WORD.match(cursor.buffer)
    if found is None or cursor.buffer[found.end() : found.end() + 1] not in END:
        return False
    return found[1] in WORDS or NUMBER.fullmatch(found[1]) is not None


def _text_ends(names: Iterable[str], cursor: Cursor) -> Generator[None, None, bool]:
    """Return whether the quote at the cursor ends its string. Quotes within it may not be escaped."""
    at = yield from past_spaces(cursor, 1)
    if cursor.buffer[at : at + 1] == ",":
        at = yield from past_spaces(cursor, at + 1)
    if (yield from ahead(cursor, at, [f"{name}=" for name in names if not PLAIN_NAME.fullmatch(name)])):
        return True
    while not cursor.ended and UNDECIDED.match(cursor.buffer, 1):
        yield
    return bool(GOES_ON.match(cursor.buffer, 1) or UNDECIDED.match(cursor.buffer, 1))
