"""The tools that a model may or must call, and grammars of calls in each model family's notation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import refusal
from ..parsers.base import NAME
from ..parsers.formats import FUNCTION_GEMMA, GEMMA_4
from ..parsers.json_calls import MISTRAL_ARGUMENTS, MISTRAL_TAG
from .lark import Lark, items_of, mapping_of, types_of

Tool = Mapping[str, Any]  # in the form of chat completions


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A choice of the one tool that must be called."""

    name: str


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """A choice among some of the tools: one may be called ("auto") or must be ("required")."""

    names: frozenset[str]
    mode: Literal["auto", "required"]


ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedTools


def tool_name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def read_choice(given: str | dict[str, Any]) -> ToolChoice:
    """Return OpenAI's `tool_choice`, in the form of chat completions or of responses.

    Raises:
        InvalidRequestError: the value is no tool choice, or names tools that only the provider has.
    """
    match given:
        case "auto" | "none" | "required":
            return given
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return NamedTool(name)
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)} | {"type": "allowed_tools", **allowed}:
            return _allowed_tools(allowed)
    rule = '"none", "auto", "required", {"type": "function", "function": {"name": …}} or allowed_tools'
    raise refusal("tool_choice", f"must be {rule}")


def _allowed_tools(given: Mapping[Any, Any]) -> AllowedTools:
    """Read OpenAI's object with `mode` and `tools`. Tools other than functions are the provider's own and left out."""
    mode, tools = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise refusal("tool_choice", "allowed_tools needs mode ('auto' or 'required') and tools (an array)")
    functions = [tool for tool in tools if isinstance(tool, dict) and tool.get("type", "function") == "function"]
    return AllowedTools(frozenset(map(_given_name, functions)), mode)


def _given_name(tool: Mapping[str, Any]) -> str:
    """Return the name in the form of chat completions or of responses."""
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise refusal("tool_choice", "each of the allowed tools needs a name")


def resolve_tool_choice(tools: Sequence[Tool], choice: ToolChoice) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools that the model sees, and the remaining choice among them.

    Raises:
        InvalidRequestError: an allowed tool does not exist.
    """
    match choice:
        case "none":
            return (), choice
        case AllowedTools():
            missing = choice.names - {tool_name(tool) for tool in tools}
            if missing:
                raise refusal("tool_choice", f"no tool is called {min(missing)!r}")
            return tuple(tool for tool in tools if tool_name(tool) in choice.names), choice.mode
    return tuple(tools), choice


Schema = Mapping[str, Any]

_SCALARS = {"number", "integer", "boolean", "null"}
# a schema without these words leaves the type open
_TYPED = {"type", "anyOf", "oneOf", "allOf", "$ref", "const", "enum"}
_OPEN = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if", "not"}
_MOST_CALLS = 16  # calls in one answer; a weak model could write them without end


def forced_tools(tools: Sequence[Tool], choice: ToolChoice) -> Sequence[Tool]:
    """Return the tools of which one must be called, none if a call is optional.

    Raises:
        InvalidRequestError: there is no such tool.
    """
    if choice in ("auto", "none"):
        return ()
    chosen = [tool for tool in tools if not isinstance(choice, NamedTool) or tool_name(tool) == choice.name]
    if not chosen:
        missing = f"no tool is called {choice.name!r}" if isinstance(choice, NamedTool) else "needs tools"
        raise refusal("tool_choice", missing)
    return chosen


def has_grammar(tool_format: str | None) -> bool:
    """Return whether a grammar exists for calls in this notation."""
    return tool_format in _NOTATIONS


def calls_rule(lark: Lark, tools: Sequence[Tool], tool_format: str | None, parallel: bool) -> str:
    """Return the rule of one call, or of several calls, in the notation of `tool_format`.

    Raises:
        InvalidRequestError: the model has no notation for calls, or a tool can't be written in it.
    """
    if not has_grammar(tool_format):
        raise refusal("tool_choice", "calls can't be forced in this model's notation")
    call, between = _NOTATIONS[tool_format]
    calls = [call(lark, _enforceable(lark, tool)) for tool in tools]
    match tool_format:
        case "harmony":  # a message holds one call
            return lark.rule("harmony", f"{lark.analysis()} {_several(lark, calls, False)}")
        case "mistral" if MISTRAL_ARGUMENTS not in lark.special:
            inner = _several(lark, calls, parallel, ", ")
            return lark.rule("mistral", f'{lark.literal(MISTRAL_TAG)} " "? "[" {inner} "]"')
    return _several(lark, calls, parallel, between)


def _enforceable(lark: Lark, tool: Tool) -> Tool:
    """Return the tool with the enforceable part of its parameters. Messages name the tool."""
    function, name = tool["function"], tool_name(tool)
    if not NAME.fullmatch(name):
        raise refusal("tools", f"{name!r:.40} can't be forced: letters, digits and _-.:/ only")
    parameters = lark.enforceable(_parameters(tool), function.get("strict") is True, "tools", f"{name}: ")
    return {**tool, "function": {**function, "parameters": parameters}}


def _parameters(tool: Tool) -> Schema:
    return mapping_of(tool["function"].get("parameters"))


def _arguments(lark: Lark, tool: Tool) -> str:
    """Return the schema of the arguments, which are an object whatever else the schema says."""
    return _json(lark, _without_extra_members({"type": "object", **_parameters(tool)}), tool)


def _without_extra_members(schema: Schema) -> Schema:
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
        if _OPEN.isdisjoint(schema) and all(name in properties for name in _required(schema)):
            out["additionalProperties"] = False
    return out


def _json(lark: Lark, schema: Schema, tool: Tool) -> str:
    return lark.json(schema, strict=tool["function"].get("strict") is True, field="tools")


def _several(lark: Lark, calls: Sequence[str], parallel: bool, between: str = "") -> str:
    call = lark.rule("call", " | ".join(calls))
    separator = lark.literal(between) if between else ""
    return lark.rule("calls", f"{call} ({separator} {call}){{0,{_MOST_CALLS - 1}}}" if parallel else call)


# --- notations whose arguments are JSON ------------------------------------------------------------------------------


def _hermes(lark: Lark, tool: Tool) -> str:
    r"""<tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>"""
    begin = lark.literal(f'<tool_call>\n{{"name": "{tool_name(tool)}", "arguments": ')
    end = lark.literal("}\n</tool_call>")
    return f"{begin} {_arguments(lark, tool)} {end}"


def _mistral(lark: Lark, tool: Tool) -> str:
    """[TOOL_CALLS]f[ARGS]{...} with newer tokenizers, else one of [TOOL_CALLS] [{"name": "f", "arguments": {...}}]."""
    if MISTRAL_ARGUMENTS in lark.special:
        head = lark.literal(f"{MISTRAL_TAG}{tool_name(tool)}{MISTRAL_ARGUMENTS}")
        return f"{head} {_arguments(lark, tool)}"
    head = lark.literal(f'{{"name": "{tool_name(tool)}", "arguments": ')
    return f'{head} {_arguments(lark, tool)} "}}"'


def _harmony(lark: Lark, tool: Tool) -> str:
    """<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}"""
    begin = lark.literal(f"<|channel|>commentary to=functions.{tool_name(tool)} <|constrain|>json<|message|>")
    return f"{begin} {_arguments(lark, tool)}"


# --- notations with one field per argument ---------------------------------------------------------------------------


def _fields(schema: Schema) -> list[tuple[str, Schema, bool]]:
    """Yield name, schema and whether it is required, for each member of an object. References still resolve in each."""
    shared = _definitions(schema)
    properties = mapping_of(schema.get("properties"))
    required = dict.fromkeys(_required(schema))
    names = {**properties, **required}
    return [(name, {**shared, **mapping_of(properties.get(name))}, name in required) for name in names]


def _required(schema: Schema) -> list[str]:
    return [name for name in items_of(schema.get("required")) if isinstance(name, str)]


def _definitions(schema: Schema) -> Schema:
    """Return the definitions that references inside a schema point to."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _types(schema: Schema) -> set[str]:
    """Return the JSON types that a schema names; empty means any."""
    branches = [*items_of(schema.get("anyOf")), *items_of(schema.get("oneOf"))]
    return types_of(schema).union(*(_types(mapping_of(branch)) for branch in branches))


def _texts(schema: Schema) -> list[str] | None:
    """Return the texts of an enumeration of texts, None for any other schema."""
    values = items_of([schema["const"]] if "const" in schema else schema.get("enum"))
    return values if values and all(isinstance(value, str) for value in values) else None


def _value(lark: Lark, schema: Schema, end: str, tool: Tool) -> str:
    """Return the rule of a value and the literal `end`: text unquoted, every other type as JSON.

    A text is free up to `end` unless it is one of an enumeration: these notations have neither quotes nor escapes.
    """
    if (texts := _texts(schema)) is not None:
        return f"{lark.any_of(texts)} {lark.literal(end)}"
    if "string" in _types(schema) or _TYPED.isdisjoint(schema):
        return lark.free_text(end)
    return f"{_json(lark, schema, tool)} {lark.literal(end)}"


def _tagged_arguments(lark: Lark, tool: Tool, begin: Callable[[str], str], end: str) -> str:
    """Return the rule of all arguments in the schema's order, with optional ones."""
    rules = []
    for name, schema, required in _fields(_parameters(tool)):
        value = _value(lark, schema, end, tool)
        rules.append(f"({begin(name)} {value}){'' if required else '?'}")
    return " ".join(rules)


def _xml(lark: Lark, tool: Tool) -> str:
    r"""<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"""
    begin, end = lark.literal(f"<tool_call>\n<function={tool_name(tool)}>\n"), lark.literal("</function>\n</tool_call>")
    fields = _tagged_arguments(lark, tool, lambda name: lark.literal(f"<parameter={name}>\n"), "\n</parameter>\n")
    return f"{begin} {fields} {end}"


def _glm(lark: Lark, tool: Tool) -> str:
    """<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>, with or without line breaks between."""
    newline = lark.define("newline", r'"\n"?')

    def begin(name: str) -> str:
        return f"{newline} {lark.literal(f'<arg_key>{name}</arg_key>')} {newline} {lark.literal('<arg_value>')}"

    fields = _tagged_arguments(lark, tool, begin, "</arg_value>")
    return f"{lark.literal(f'<tool_call>{tool_name(tool)}')} {fields} {newline} {lark.literal('</tool_call>')}"


# --- Gemma -----------------------------------------------------------------------------------------------------------


def _gemma(lark: Lark, tool: Tool) -> str:
    """<|tool_call>call:f{x:1,y:<|"|>text<|"|>}<tool_call|>; FunctionGemma's tokenizer has other markers."""
    begin, end, quote = FUNCTION_GEMMA if FUNCTION_GEMMA[0] in lark.special else GEMMA_4
    fields = _gemma_object(lark, _parameters(tool), quote)
    return f"{lark.literal(f'{begin}call:{tool_name(tool)}')} {fields} {lark.literal(end)}"


def _gemma_object(lark: Lark, schema: Schema, quote: str) -> str:
    """Return the rule of {x:1,y:2}: required members, then optional ones, in the schema's order."""
    pairs: dict[bool, list[str]] = {True: [], False: []}
    for name, inner, required in _fields(schema):
        pairs[required].append(lark.rule("pair", f"{lark.literal(f'{name}:')} {_gemma_value(lark, inner, quote)}"))
    if pairs[True]:
        body = " ".join([' "," '.join(pairs[True]), *(f'("," {pair})?' for pair in pairs[False])])
    else:
        body = f"{_some_of(lark, pairs[False])}?" if pairs[False] else ""
    return lark.rule("object", f'"{{" {body} "}}"')


def _some_of(lark: Lark, pairs: Sequence[str]) -> str:
    """Return the rule of one or more of the pairs, in their order, with commas between. Halves keep it flat."""
    if len(pairs) == 1:
        return pairs[0]
    first, second = (_some_of(lark, half) for half in (pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]))
    return lark.rule("some", f'{first} ("," {second})? | {second}')


def _gemma_value(lark: Lark, schema: Schema, quote: str) -> str:
    """Return the rule of a value, by its type if it has exactly one. Other values only follow the notation."""
    types = _types(schema)
    if (texts := _texts(schema)) is not None:
        return f"{lark.literal(quote)} {lark.any_of(texts)} {lark.literal(quote)}"
    if types == {"string"}:
        return f"{lark.literal(quote)} {lark.free_text(quote)}"
    if types == {"object"} and _fields(schema):
        return _gemma_object(lark, schema, quote)
    if types == {"array"} and mapping_of(schema.get("items")):
        return _gemma_array(lark, schema, quote)
    if (types and types <= _SCALARS) or "$ref" in schema:
        return lark.json(schema, strict=False, field="tools")
    return _gemma_anything(lark, quote)


def _gemma_array(lark: Lark, schema: Schema, quote: str) -> str:
    item = _gemma_value(lark, {**_definitions(schema), **schema["items"]}, quote)
    least, most = (schema.get(name) if type(schema.get(name)) is int else None for name in ("minItems", "maxItems"))
    if most == 0:
        return '"[" "]"'
    more = f"{{{max((least or 0) - 1, 0)},{'' if most is None else most - 1}}}"
    return lark.rule("array", f'"[" ({item} ("," {item}){more}){"" if least else "?"} "]"')


def _gemma_anything(lark: Lark, quote: str) -> str:
    text = f"{lark.literal(quote)} {lark.free_text(quote)}"
    scalar = lark.json({"type": sorted(_SCALARS)})
    key = lark.define("KEY", r"/[\w-]+/")
    array, pairs = '"[" (any ("," any)*)? "]"', f'"{{" ({key} ":" any ("," {key} ":" any)*)? "}}"'
    return lark.define("any", f"{text} | {scalar} | {array} | {pairs}")


# how a call is written, and the text between two calls
_NOTATIONS: Mapping[str | None, tuple[Callable[[Lark, Tool], str], str]] = {
    "hermes": (_hermes, "\n"),
    "xml": (_xml, "\n"),
    "harmony": (_harmony, ""),
    "mistral": (_mistral, ""),
    "gemma": (_gemma, ""),
    "glm": (_glm, "\n"),
}
