"""OpenAI's custom tools: functions with one string to the model, calls with a plain text to the client."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..blocks import INPUT
from ..http.errors import refusal, require
from ..prompt.conversation import function_of, objects, unknown_tool
from ..prompt.deferred import deferral_of

Source = tuple[str, dict[str, Any]]  # a tool as it was sent, behind its path
Origin = tuple[str | None, str]  # a function's namespace, if it came in one, and its name there
CUSTOM = "custom"
_PARAMETERS = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
_ANCHOR = re.compile(r"(?<!\\)((?:\\\\)*)\$$")  # at the end, where no backslash makes it a sign
# Codex's, codex-rs/core/src/tools/handlers/apply_patch.lark, without comments and empty lines, and its expression.
_PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
""".strip()
_CHANGE = r"(?:(?:@@(?: .+)?|[-+ ].*)\n)+(?:\*\*\* End of File\n)?"
_HUNKS = (
    r"(?:\*\*\* Add File: .+\n(?:\+.*\n)+|\*\*\* Delete File: .+\n"
    rf"|\*\*\* Update File: .+\n(?:\*\*\* Move to: .+\n)?(?:{_CHANGE})?)+"
)
_BEGIN_PATCH, _END_PATCH = r"\*\*\* Begin Patch\n", r"\*\*\* End Patch\n?"
_ENVIRONMENT = "hunk+ end_patch", 'environment_id? hunk+ end_patch\nenvironment_id: "*** Environment ID: " filename LF'
_KNOWN = {  # Codex adds a rule where a turn has several environments
    _PATCH: f"^{_BEGIN_PATCH}{_HUNKS}{_END_PATCH}$",
    _PATCH.replace(*_ENVIRONMENT): rf"^{_BEGIN_PATCH}(?:\*\*\* Environment ID: .+\n)?{_HUNKS}{_END_PATCH}$",
}


class UnenforcedError(Exception):
    """A grammar that is not enforced; the text says why."""


def custom_function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a custom tool as a function; raises as `function_of`."""
    return function_of({**tool, "parameters": _PARAMETERS}, where, "parameters")


def input_pattern(tool: Mapping[str, Any], where: str) -> str | None:
    """Return the regular expression of a custom tool's input, None for free text.

    Raises:
        InvalidRequestError: the format is no object, or its grammar no text.
        UnenforcedError: the grammar is neither a regular expression nor Codex's.
    """
    form = tool.get("format")
    require(form is None or isinstance(form, dict), f"{where}.format", "must be an object")
    kind = "text" if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind != "grammar":
        raise UnenforcedError(f"its type {kind!r:.40} is neither text nor grammar")
    grammar: Any = form.get("definition", form.get("grammar"))
    require(isinstance(grammar, str), f"{where}.format.definition", "must be a string")
    match form.get("syntax"):
        case "lark":
            lines = [line.strip() for line in grammar.splitlines()]
            pattern = _KNOWN.get("\n".join(line for line in lines if line and not line.startswith(("#", "//"))))
            if pattern is None:
                raise UnenforcedError("of lark only that of Codex's apply_patch is known; use the syntax regex")
            return pattern
        case "regex":
            whole = _ANCHOR.sub(r"\1", grammar.removeprefix("^"))
            return f"^(?:{whole})$"
    raise UnenforcedError(f"its syntax {form.get('syntax')!r:.40} is neither lark nor regex")


def input_patterns(custom: Mapping[str, Source], left_out: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the regular expression of each custom tool's input. Add a sentence for each that is not enforced."""
    for name, (where, tool) in custom.items():
        try:
            pattern = input_pattern(tool, where)
        except UnenforcedError as error:
            left_out.append(f"{where}.format: the grammar of {name} is not enforced: {error}")
        else:
            if pattern is not None:
                yield name, pattern


@dataclass(frozen=True, slots=True)
class Tools:
    """The client's tools as functions of chat completions.

    Attributes:
        custom: the names of tools whose calls are plain texts.
        inputs: the regular expressions of such texts, by name.
        left_out: sentences about tools and grammars that are not in them.
        shown: the name of each function from a namespace or without one, by both.
        has_search: the client searches for deferred tools.
    """

    functions: tuple[Any, ...]
    custom: frozenset[str] = frozenset()
    inputs: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    shown: Mapping[Origin, str] = field(default_factory=dict)
    has_search: bool = False


def chat_tools(tools: Sequence[Any]) -> Tools:
    """Return the tools with custom ones as functions.

    Raises:
        InvalidRequestError: `field` is the path of the value at fault.
    """
    functions, custom, left_out = list[Any](), dict[str, Source](), list[str]()
    for where, tool in objects(tools, "tools"):
        match tool.get("type", "function"):
            case "function":
                functions.append(tool)
            case "custom":
                source, flat = f"{where}.{CUSTOM}", _flat(tool, where)
                function = custom_function(flat, source) | deferral_of(flat, source)
                functions.append({**tool, "type": "function", "function": function})
                custom[flat["name"]] = source, flat
            case kind:
                left_out.append(unknown_tool(where, kind))
    inputs = dict(input_patterns(custom, left_out))
    return Tools(tuple(functions), frozenset(custom), inputs, tuple(left_out))


def _flat(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a custom tool of chat completions as responses have it."""
    custom = tool.get(CUSTOM)
    if not isinstance(custom, dict):
        raise refusal(f"{where}.{CUSTOM}", "must be an object")
    form = custom.get("format")
    if isinstance(form, dict) and isinstance(form.get("grammar"), dict):
        form = {**form, **form["grammar"]}
    return {**custom, "format": form}
