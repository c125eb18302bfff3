"""JSON as clients write it: whole numbers of any length, texts that were cut inside a pair of surrogates.

orjson rounds or refuses the first and refuses the second. It reads and writes everything else. Python reads and prints
whole numbers only up to some length: longer ones are a `LongInteger`.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any, SupportsIndex
from weakref import WeakValueDictionary

import orjson

DEEPEST = 250  # levels of arrays and objects; a value may be written a little deeper, and orjson writes at most 254
TOO_DEEP = f"it is nested too deeply: more than {DEEPEST} levels"
ZEROS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else byte for byte in range(256))
LONG = b"0" * 19  # digits; the shortest integer beyond 64 bits has as many
LONG_INTEGER = re.compile(rb"[\[:,]\s*-?[0-9]{19}")
# All escapes are matched, so that the second half of an escaped backslash begins none.
ESCAPES = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL)
REPLACEMENT = rb"\ufffd"

PRINTABLE = sys.int_info.str_digits_check_threshold  # digits that Python reads and prints whatever its own limit is
MARK, RANDOM = "4728310956", 40
STAND_IN = re.compile(f"{MARK}[0-9]{{{RANDOM}}}", re.ASCII)


class Digits(str):
    """The text of a whole number. A weak reference can hold it, but no number."""


class LongInteger(int):
    """A whole number that is kept as text.

    Its value is a random stand-in, which templates and `json` print as any number. `restored` puts the text there.
    """

    text: Digits

    def __new__(cls, text: str) -> LongInteger:
        stand_in = f"{MARK}{secrets.randbelow(10**RANDOM):0{RANDOM}}"
        number = super().__new__(cls, -int(stand_in) if text.startswith("-") else int(stand_in))
        number.text = _known[stand_in] = Digits(text)
        return number

    def __repr__(self) -> str:
        return self.text

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[LongInteger], tuple[str]]:
        return LongInteger, (str(self),)


_known = WeakValueDictionary[str, Digits]()


def restored(text: str) -> str:
    """Return the text with the digits of long integers in the places of their stand-ins."""
    if MARK not in text:
        return text
    return STAND_IN.sub(lambda found: _known.get(found[0], found[0]).lstrip("-"), text)


def loads(text: str | bytes | bytearray) -> Any:
    """Return the value. Half a surrogate pair becomes U+FFFD, as in cut-off UTF-8.

    Raises:
        ValueError: it is no JSON, or nested too deeply.
    """
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        whole = ESCAPES.sub(lambda escape: REPLACEMENT if escape[1] else escape[0], raw)
        if _has_long_integers(whole):
            value = _with_long_integers(whole)
        elif whole != raw:
            value = orjson.loads(whole)
        else:
            raise
    else:
        if _has_long_integers(raw):
            value = _with_long_integers(raw)
    if is_too_deep(value):
        raise ValueError(TOO_DEEP)
    return value


def is_too_deep(value: Any) -> bool:
    """Return whether a JSON value has more than DEEPEST levels: what reads it again or writes it recurses."""
    return next(islice(_levels(value), DEEPEST, None), None) is not None


def _levels(value: Any) -> Iterator[list[Any]]:
    """Yield the arrays and objects of each level of nesting, from the outside in."""
    level = [value] if isinstance(value, list | dict) else []
    while level:
        yield level
        inside = (part for each in level for part in (each.values() if isinstance(each, dict) else each))
        level = [part for part in inside if isinstance(part, list | dict)]


def _has_long_integers(raw: bytes | bytearray) -> bool:
    return LONG in raw.translate(ZEROS) and LONG_INTEGER.search(raw) is not None


def _with_long_integers(raw: bytes | bytearray) -> Any:
    try:
        return json.loads(raw.decode(), parse_int=integer, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def integer(digits: str) -> int:
    """Return a whole number that `dumps` writes with the same digits, however many."""
    return int(digits) if len(digits) <= PRINTABLE else LongInteger(digits)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is no finite number")
    return value


def dumps(value: Any) -> bytes:
    """Return compact JSON."""
    try:
        return orjson.dumps(value)
    except TypeError:  # its only error for values that were read by `loads`: an integer beyond 64 bits
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return restored(text).encode()
