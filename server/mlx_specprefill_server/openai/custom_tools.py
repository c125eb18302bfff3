"""OpenAI's custom tools: functions with one string to the model, calls with a plain text to the client."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..constrained.flat_lark import FlatteningError, flatten
from ..errors import require
from ..prompt.conversation import function_of

INPUT = "input"  # the string's name
_PARAMETERS = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}"  # of two escapes, one character
_PARTS = re.compile(rf'(?:[^"\\]|{_PAIR}|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|\\[^u])+')
_flatten = lru_cache(64)(flatten)  # agents send the same grammars with every request


def custom_function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a custom tool as a function; raises as `function_of`."""
    return function_of({**tool, "parameters": _PARAMETERS}, where, "parameters")


def input_pattern(tool: Mapping[str, Any], where: str) -> str | None:
    """Return the regular expression of a custom tool's input, None for free text.

    Raises:
        InvalidRequestError: the format is no object, or its grammar no text.
        FlatteningError: the grammar can't be followed.
    """
    form = tool.get("format")
    require(form is None or isinstance(form, dict), f"{where}.format", "must be an object")
    if form is None or form.get("type") != "grammar":
        return None
    grammar: Any = form.get("definition", form.get("grammar"))
    require(isinstance(grammar, str), f"{where}.format.definition", "must be a string")
    match form.get("syntax"):
        case "lark":
            return f"^{_flatten(grammar)}$"
        case "regex":
            return f"^(?:{grammar.removeprefix('^').removesuffix('$')})$"
    raise FlatteningError(f"its syntax {form.get('syntax')!r:.40} is neither lark nor regex")


class InputText:
    """A reader of the input in a call's arguments, as their text comes."""

    def __init__(self) -> None:
        self._waiting = ""
        self._begun = False

    def push(self, text: str) -> str:
        """Add JSON text and return what it says of the input."""
        self._waiting += text
        if not self._begun:
            match = _BEGIN.match(self._waiting)
            if match is None:
                return ""
            self._begun, self._waiting = True, self._waiting[match.end() :]
        parts = _PARTS.match(self._waiting)
        if parts is None:
            return ""
        self._waiting = self._waiting[parts.end() :]
        return str(json.loads(f'"{parts[0]}"', strict=False))


def whole_input(arguments: str) -> str:
    """Return the input of a complete call. Arguments of another form are passed on as they are."""
    value = json.loads(arguments).get(INPUT)
    return value if isinstance(value, str) else arguments
