"""JSON as clients write it: integers of any length, and texts that were cut inside a pair of surrogates.

orjson rounds the first to floats and refuses the second. It reads and writes everything else.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

ZEROS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else byte for byte in range(256))
LONG = b"0" * 19  # digits; the shortest integer beyond 64 bits has as many
LONG_INTEGER = re.compile(rb"[\[:,]\s*-?[0-9]{19}")
# All escapes are matched, so that the second half of an escaped backslash begins none.
ESCAPES = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL)
REPLACEMENT = rb"\ufffd"


def loads(text: str | bytes | bytearray) -> Any:
    """Return the value. Half a surrogate pair becomes U+FFFD, as in cut-off UTF-8.

    Raises:
        orjson.JSONDecodeError: it is no JSON.
    """
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        whole = ESCAPES.sub(lambda escape: REPLACEMENT if escape[1] else escape[0], raw)
        if whole == raw:
            raise
        raw, value = whole, orjson.loads(whole)
    if LONG in raw.translate(ZEROS) and LONG_INTEGER.search(raw):
        return _with_long_integers(raw, value)
    return value


def _with_long_integers(raw: bytes | bytearray, rounded: Any) -> Any:
    """Read what orjson has read once more. Python refuses integers of thousands of digits, and deeper nesting."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return rounded


def dumps(value: Any) -> bytes:
    """Return compact JSON."""
    try:
        return orjson.dumps(value)
    except TypeError:  # its only error for values that were read by `loads`: an integer beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
