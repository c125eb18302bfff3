"""Grammars of calls: alone, and within free text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..http.errors import refusal
from ..notations import NOTATIONS
from ..notations.declaration import NAME, Notation, Written
from ..notations.harmony import HEADER
from ..notations.mistral import CALL_ID, SHORT_ID
from ..prompt.deferred import Tool, tool_name
from ..schemas import Resolver, Schema, items_of, mapping_of, types_of
from .lark import Lark, escaped, terminal

_OPEN = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if", "not"}
_MOST_CALLS = 16  # calls in one answer; a weak model could write them without end
_NO_NAME = "[^A-Za-z0-9_-]"  # parts a name from other text
_NAME_BEFORE = 24  # characters; a call's name begins within so many behind its mark
_HOLES = re.compile(r"\{(arguments|number|id|space)\}")


def calls_rule(lark: Lark, tools: Sequence[Tool], tool_format: str | None, parallel: bool) -> str:
    """Return the rule of one call, or of several calls, as JSON with the marks of `tool_format`, or in `<tool_call>`.

    Raises:
        InvalidRequestError: a tool has a name or parameters that no call can have.
    """
    written = _written(lark, tool_format)
    call = lark.rule("call", " | ".join(_call(lark, written, tool) for tool in tools))
    if parallel and written.between is not None:
        separator = lark.literal(written.between) if written.between else ""
        call = lark.rule("calls", f"{call} ({separator} {call}){{0,{_MOST_CALLS - 1}}}")
    before = lark.analysis() if tool_format == "harmony" else _filled(lark, written.before)
    return lark.rule("all", f"{before} {call} {_filled(lark, written.after)}")


def _written(lark: Lark, tool_format: str | None) -> Written:
    """Return how calls as JSON are written with this vocabulary."""
    written = NOTATIONS.get(tool_format or "", Notation()).written
    return next(one for one in written if not one.needs or one.needs in lark.special)


def _call(lark: Lark, written: Written, tool: Tool) -> str:
    """Return the rule of a call of a tool, with all line breaks or none. Messages name the tool."""
    schema, text = _enforceable(lark, tool), written.call.replace("{name}", tool_name(tool))
    # What begins a text has to go on behind the name, or it is taken for other text.
    ways = dict.fromkeys(text.replace("{line}", line) for line in ("\n", ""))
    return f"({' | '.join(_way(lark, written, way, schema) for way in ways)})"


def _way(lark: Lark, written: Written, text: str, schema: Schema) -> str:
    head, is_text, tail = text.partition("{input}")
    if not is_text:
        return _filled(lark, text, arguments=lark.enforced_json(schema))
    pattern = schema["properties"]["input"].get("pattern", "").removeprefix("^").removesuffix("$")
    return f"{_filled(lark, head)} {lark.free_text(tail, written.excluded, pattern)}"


def _filled(lark: Lark, text: str, arguments: str = "") -> str:
    """Return the rule of a text with what may stand in its holes."""
    given = f"({lark.literal(CALL_ID)} /{SHORT_ID.pattern}/)?" if CALL_ID in lark.special else ""
    holes = {"arguments": arguments, "number": "/[0-9]{1,2}/", "id": given, "space": '" "?'}
    return " ".join(holes[part] if i % 2 else lark.literal(part) for i, part in enumerate(_HOLES.split(text)) if part)


def _enforceable(lark: Lark, tool: Tool) -> dict[str, Any]:
    """Return the enforceable part of the parameters, which are an object whatever else the schema allows."""
    function, name = tool["function"], tool_name(tool)
    if not NAME.fullmatch(name):
        raise refusal("tools", f"{name!r:.40} can't be forced: letters, digits and _-.:/ only")
    strict = function.get("strict") is True
    schema = lark.enforceable(mapping_of(function.get("parameters")), strict, "tools", f"{name}: ")
    if not any("object" in types_of(way) for way in Resolver(schema).ways(schema)):
        raise refusal("tools", f"{name}: no arguments match the schema")
    return {**_without_extra_members(schema), "type": "object"}


def _without_extra_members(schema: Schema) -> dict[str, Any]:
    """Return the schema without undescribed members. A tool can't use them, and a model may write them without end.

    JSON schema allows them by default. Schemas composed of others stay unchanged.
    """
    out = dict(schema)
    if isinstance(items := schema.get("items"), dict):
        out["items"] = _without_extra_members(items)
    properties = schema.get("properties")
    if isinstance(properties, dict):
        out["properties"] = {
            n: _without_extra_members(inner) if isinstance(inner, dict) else inner for n, inner in properties.items()
        }
        if _OPEN.isdisjoint(schema) and set(items_of(schema.get("required"))) <= set(properties):
            out["additionalProperties"] = False
    return out


def with_patterns(tools: Sequence[Tool], inputs: Mapping[str, str]) -> Sequence[Tool]:
    """Return the tools with the patterns of their inputs, which prompts don't show, in their schemas."""
    return [_with_pattern(tool, inputs[tool_name(tool)]) if tool_name(tool) in inputs else tool for tool in tools]


def _with_pattern(tool: Tool, pattern: str) -> Tool:
    function = tool["function"]
    parameters = {**function["parameters"], "properties": {"input": {"type": "string", "pattern": pattern}}}
    return {**tool, "function": {**function, "parameters": parameters}}


def answer_with_calls(lark: Lark, tools: Sequence[Tool], tool_format: str | None) -> bool:
    """Define an answer of free text and calls, in which calls of these tools follow their schemas.

    Return whether this notation has marks around calls that are tokens of the vocabulary; otherwise nothing is defined.
    """
    if tool_format == "harmony":
        return _harmony_with_calls(lark, tools)
    notation = NOTATIONS.get(tool_format or "", Notation())
    marks = notation.begun
    if marks is None or not lark.special.keys() >= set(marks):
        return False
    others = _specials_but(lark, marks[:1])
    begin, end = lark.literal(marks[0]), f"<[{others}]>" if notation.marked else lark.literal(marks[1])
    written = notation.text or _written(lark, tool_format)
    calls = [_call(lark, written, tool) for tool in tools]
    _define_texts(lark, f"((?s:.){{0,{_NAME_BEFORE}}}{_NO_NAME})?", tools)
    lark.define("said", f"(SAID | <[{others}]>)*")
    lark.define("start", f"said (({' | '.join(calls)} | {begin} OTHER {end}) said)*")
    return True


def _harmony_with_calls(lark: Lark, tools: Sequence[Tool]) -> bool:
    """Define messages of which those to these tools hold their arguments. Each has a header before its text:

    `<|start|>assistant to=functions.f<|channel|>commentary json<|message|>`, or the recipient behind the channel. The
    answer begins within the first one.
    """
    if not lark.special.keys() >= set(HEADER):
        return False
    others = _specials_but(lark, HEADER[:2])
    start, channel, constrain, message = map(lark.literal, HEADER)
    _define_texts(lark, "(?s:.)*to=(functions[.])?", tools)
    lark.define("said", f"(<[{others}]> SAID?)*")  # what follows another mark is no header
    lark.define("TYPE", f"/[a-z ]{{0,{_NAME_BEFORE}}}/")
    kind = lark.define("kind", f"({channel} TYPE)? ({constrain} TYPE)? {message}")
    calls = [f"{_to(lark, tool)} {kind} {lark.enforced_json(_enforceable(lark, tool))}" for tool in tools]
    call = lark.rule("call", " | ".join(calls))
    lark.define("message", f"({call} | OTHER?) said")
    lark.define("start", f"message (({start} | {channel}) message)*")
    return True


def _to(lark: Lark, tool: Tool) -> str:
    """Return a part of a header that names the tool as the recipient."""
    head = f"(?s:.){{0,{_NAME_BEFORE}}}to=(functions[.])?{escaped(tool_name(tool))}"
    return lark.rule("TO", terminal(f"{head}( [a-z ]{{0,{_NAME_BEFORE}}})?"))


def _specials_but(lark: Lark, marks: Sequence[str]) -> str:
    """Return the numbers of the special tokens that are none of these marks."""
    return ",".join(str(token) for token in sorted(token for name, token in lark.special.items() if name not in marks))


def _define_texts(lark: Lark, before: str, tools: Sequence[Tool]) -> None:
    """Define SAID, any text, and OTHER, in which no name of these tools stands behind what `before` matches."""
    names = "|".join(escaped(tool_name(tool)) for tool in tools)
    lark.define("SAID", "/(?s:.)+/")
    lark.define("OTHER", f"/(?s:.)*/ & ~{terminal(f'{before}({names})({_NO_NAME}(?s:.)*)?')}")
