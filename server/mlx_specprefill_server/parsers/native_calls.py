"""Calls in formats that mlx-lm reads with a parser of its own: each as a whole, at its end mark."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .base import Cursor, MalformedError, Reading, Tools, overlap
from .call_parts import CallReader, whole_call

# Errors of parsers for well-formed calls on malformed ones.
FAULTS = (ValueError, TypeError, LookupError, AttributeError, SyntaxError, ArithmeticError, RecursionError, MemoryError)


def native_reader(opener: str, closer: str, parse: Callable[..., Any], tools: list[Any]) -> CallReader:
    """Return a reader of `<opener>...<closer>` by mlx-lm's `parse(text, tools)`. Without a closer the call ends with
    the text.
    """

    def read(cursor: Cursor, known: Tools) -> Reading[None]:
        cursor.take(len(opener))
        text = yield from _native_body(cursor, closer)
        try:
            parsed = parse(text, tools)
            calls = [check_native_call(call, known) for call in (parsed if isinstance(parsed, list) else [parsed])]
        except FAULTS as error:
            raise MalformedError(str(error)) from error
        for name, arguments in calls:
            yield from whole_call(name, arguments)

    return read


def _native_body(cursor: Cursor, closer: str) -> Reading[str]:
    """Read text up to the end tag. Text that is cut off is no call."""
    text = ""
    while True:
        at = cursor.buffer.find(closer) if closer else -1
        if at >= 0:
            text += cursor.take(at)
            cursor.take(len(closer))
            return text
        text += cursor.take(len(cursor.buffer) - overlap(cursor.buffer, (closer,)) * (not cursor.ended))
        if cursor.ended:
            if not cursor.complete:
                raise MalformedError("the text ends inside a call")
            return text
        yield None


def check_native_call(call: Any, tools: Tools) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a call that another library has read."""
    name, arguments = call["name"], call.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise MalformedError("no call")
    json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    return tools.name(name), arguments
