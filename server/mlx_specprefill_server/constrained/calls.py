"""Grammars of calls in each model family's notation, alone and within free text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..call_marks import Marks, Tags
from ..errors import refusal
from ..notations import (
    ATEM,
    CALL,
    COMMAND,
    DEEPSEEK,
    DSML,
    DSML_4,
    END_CALL,
    END_COMMAND,
    END_KEY,
    END_LFM2,
    END_VALUE,
    FUNCTION_GEMMA,
    GEMMA_4,
    GLM_ENDS,
    GRANITE,
    HARMONY,
    KEY,
    KIMI,
    LFM2,
    MINIMAX,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALL_ID,
    MISTRAL_TAG,
    MUSE_END,
    NAME,
    SEED,
    SHORT_ID,
    VALUE,
    XML,
)
from ..prompt.deferred import Tool, tool_name
from ..schemas import Schema, items_of, mapping_of
from .lark import Lark, escaped, terminal
from .unquoted import ForcedTool, Gemma, Keywords, Unquoted

_OPEN = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if", "not"}
_MOST_CALLS = 16  # calls in one answer; a weak model could write them without end
_NO_NAME = "[^A-Za-z0-9_-]"  # parts a name from other text
_NAME_BEFORE = 24  # characters; a call's name begins within so many behind its mark
# The marks before a call's name and behind the call, or else behind the name, where others may stand, too.
_CALL_MARKS: Mapping[str, tuple[str, str]] = {
    "hermes": (CALL, END_CALL),
    "xml": (CALL, END_CALL),
    "glm": (CALL, END_CALL),
    "minimax": (MINIMAX.call, MINIMAX.end_call),
    "seed": (SEED.call, SEED.end_call),
    "mistral": (MISTRAL_TAG, MISTRAL_ARGUMENTS),
    "kimi": (KIMI.call, KIMI.arguments),
    "deepseek": (DEEPSEEK.call, DEEPSEEK.arguments),
    "gemma": GEMMA_4[:2],
}
_MARKED_NAMES = ("mistral", "kimi", "deepseek", "glm")  # GLM's marks of arguments are tokens, too


def has_grammar(tool_format: str | None) -> bool:
    """Return whether a grammar exists for calls in this notation."""
    return tool_format in _NOTATIONS


def forced_format(tool_format: str | None) -> str:
    """Return the notation of forced calls: the model's own, or one that is read in every answer."""
    return tool_format if tool_format is not None and has_grammar(tool_format) else "hermes"


def calls_rule(lark: Lark, tools: Sequence[Tool], tool_format: str | None, parallel: bool) -> str:
    """Return the rule of one call, or of several calls, in the notation of `tool_format`.

    Raises:
        InvalidRequestError: the model has no notation for calls, or a tool can't be written in it.
    """
    if not has_grammar(tool_format):
        raise refusal("tool_choice", "calls can't be forced in this model's notation")
    notation = _NOTATIONS[tool_format]
    calls = [notation.call(lark, _enforceable(lark, tool)) for tool in tools]
    match tool_format:
        case "harmony":  # a message holds one call
            return lark.rule("harmony", f"{lark.analysis()} {_several(lark, calls, False)}")
        case "mistral" if MISTRAL_ARGUMENTS not in lark.special:
            inner = _several(lark, calls, parallel, ", ")
            return lark.rule("mistral", f'{lark.literal(MISTRAL_TAG)} " "? "[" {inner} "]"')
    inner = _several(lark, calls, parallel, notation.between)
    if not notation.before:
        return inner
    return lark.rule("all", f"{lark.literal(notation.before)} {inner} {lark.literal(notation.after)}")


def _enforceable(lark: Lark, tool: Tool) -> ForcedTool:
    """Return the tool with the enforceable part of its parameters. Messages name the tool."""
    function, name = tool["function"], tool_name(tool)
    if not NAME.fullmatch(name):
        raise refusal("tools", f"{name!r:.40} can't be forced: letters, digits and _-.:/ only")
    strict = function.get("strict") is True
    schema = lark.enforceable(mapping_of(function.get("parameters")), strict, "tools", f"{name}: ")
    return ForcedTool(name, _without_extra_members(schema), strict)


def _arguments(lark: Lark, tool: ForcedTool) -> str:
    """Return the rule of the arguments, which are an object whatever else the schema allows."""
    Unquoted(lark, tool).objects(tool.schema)
    return lark.enforced_json({**tool.schema, "type": "object"})


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
    marks = _CALL_MARKS.get(tool_format or "")
    if marks is None or not lark.special.keys() >= set(marks):
        return False
    others = _specials_but(lark, marks[:1])
    begin, end = lark.literal(marks[0]), f"<[{others}]>" if tool_format in _MARKED_NAMES else lark.literal(marks[1])
    calls = [_NOTATIONS[tool_format].call(lark, _enforceable(lark, tool)) for tool in tools]
    _define_texts(lark, f"((?s:.){{0,{_NAME_BEFORE}}}{_NO_NAME})?", tools)
    lark.define("said", f"(SAID | <[{others}]>)*")
    lark.define("start", f"said (({' | '.join(calls)} | {begin} OTHER {end}) said)*")
    return True


def _harmony_with_calls(lark: Lark, tools: Sequence[Tool]) -> bool:
    """Define messages of which those to these tools hold their arguments. Each has a header before its text:

    `<|start|>assistant to=functions.f<|channel|>commentary json<|message|>`, or the recipient behind the channel. The
    answer begins within the first one.
    """
    if not lark.special.keys() >= set(HARMONY):
        return False
    others = _specials_but(lark, HARMONY[:2])
    start, channel, constrain, message = map(lark.literal, HARMONY)
    _define_texts(lark, "(?s:.)*to=(functions[.])?", tools)
    lark.define("said", f"(<[{others}]> SAID?)*")  # what follows another mark is no header
    lark.define("TYPE", f"/[a-z ]{{0,{_NAME_BEFORE}}}/")
    kind = lark.define("kind", f"({channel} TYPE)? ({constrain} TYPE)? {message}")
    calls = [f"{_to(lark, tool)} {kind} {_arguments(lark, _enforceable(lark, tool))}" for tool in tools]
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


def _several(lark: Lark, calls: Sequence[str], parallel: bool, between: str = "") -> str:
    call = lark.rule("call", " | ".join(calls))
    separator = lark.literal(between) if between else ""
    return lark.rule("calls", f"{call} ({separator} {call}){{0,{_MOST_CALLS - 1}}}" if parallel else call)


# --- notations whose arguments are JSON ------------------------------------------------------------------------------


def _hermes(lark: Lark, tool: ForcedTool) -> str:
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>, with or without line breaks between."""
    head = f'{{"name": "{tool.name}", "arguments": '
    begin = " | ".join(lark.literal(f"{CALL}{line}{head}") for line in ("\n", ""))
    end = " | ".join(lark.literal(f"}}{line}{END_CALL}") for line in ("\n", ""))
    return f"({begin}) {_arguments(lark, tool)} ({end})"


def _mistral(lark: Lark, tool: ForcedTool) -> str:
    """[TOOL_CALLS]f[ARGS]{...} with newer tokenizers, else one of [TOOL_CALLS] [{"name": "f", "arguments": {...}}]."""
    if MISTRAL_ARGUMENTS in lark.special:
        given = f"({lark.literal(MISTRAL_CALL_ID)} {lark.define('ID', f'/{SHORT_ID.pattern}/')})?"
        head = f"{lark.literal(f'{MISTRAL_TAG}{tool.name}')} {given if MISTRAL_CALL_ID in lark.special else ''}"
        return f"{head} {lark.literal(MISTRAL_ARGUMENTS)} {_arguments(lark, tool)}"
    return _granite(lark, tool)


def _harmony(lark: Lark, tool: ForcedTool) -> str:
    """<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}"""
    begin = lark.literal(f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>")
    return f"{begin} {_arguments(lark, tool)}"


def _granite(lark: Lark, tool: ForcedTool) -> str:
    """<|tool_call|>[{"name": "f", "arguments": {...}}]"""
    head = lark.literal(f'{{"name": "{tool.name}", "arguments": ')
    return f'{head} {_arguments(lark, tool)} "}}"'


def _command(lark: Lark, tool: ForcedTool) -> str:
    r"""<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {...}}\n]<|END_ACTION|>"""
    head, name = lark.literal('    {"tool_call_id": "'), lark.literal(f'", "tool_name": "{tool.name}", "parameters": ')
    return f'{head} {_number(lark)} {name} {_arguments(lark, tool)} "}}"'


def _deepseek(lark: Lark, tool: ForcedTool) -> str:
    """<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>"""
    return _marked(lark, tool, DEEPSEEK, tool.name)


def _kimi(lark: Lark, tool: ForcedTool) -> str:
    """<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>"""
    return _marked(lark, tool, KIMI, f"functions.{tool.name}:", _number(lark))


def _marked(lark: Lark, tool: ForcedTool, marks: Marks, name: str, number: str = "") -> str:
    begin = f"{lark.literal(f'{marks.call}{name}')} {number} {lark.literal(marks.arguments)}"
    return f"{begin} {_arguments(lark, tool)} {lark.literal(marks.end_call)}"


def _number(lark: Lark) -> str:
    return lark.define("NUMBER", "/[0-9]{1,2}/")


# --- notations without JSON's quotes ---------------------------------------------------------------------------------


def _in_tags(lark: Lark, tool: ForcedTool, tags: Tags) -> str:
    r"""<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>, or with other tags."""
    line = "\n" if tags.lines else ""
    begin = lark.literal(f"{tags.call}\n{tags.function}{tool.name}{tags.close}\n")
    end = lark.literal(f"{tags.end_function}\n{tags.end_call}")
    fields = Unquoted(lark, tool, tags.ends(), tags.kinds).tagged(
        lambda name: lark.literal(f"{tags.parameter}{name}{tags.end_name}{line}"), f"{line}{tags.end_parameter}\n"
    )
    return f"{begin} {fields} {end}"


def _muse(lark: Lark, tool: ForcedTool) -> str:
    """to=f<|message|><atem:function_calls>..., a message to the function."""
    return f"{lark.muse_head(tool.name)} {_in_tags(lark, tool, ATEM)}"


def _glm(lark: Lark, tool: ForcedTool) -> str:
    """<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>, with or without line breaks between."""
    newline = lark.define("newline", r'"\n"?')

    def begin(name: str) -> str:
        return f"{newline} {lark.literal(f'{KEY}{name}{END_KEY}')} {newline} {lark.literal(VALUE)}"

    fields = Unquoted(lark, tool, GLM_ENDS).tagged(begin, END_VALUE)
    return f"{lark.literal(f'{CALL}{tool.name}')} {fields} {newline} {lark.literal(END_CALL)}"


def _gemma(lark: Lark, tool: ForcedTool) -> str:
    """<|tool_call>call:f{x:1,y:<|"|>text<|"|>}<tool_call|>; FunctionGemma's tokenizer has other markers."""
    begin, end, quote = FUNCTION_GEMMA if FUNCTION_GEMMA[0] in lark.special else GEMMA_4
    return f"{lark.literal(f'{begin}call:{tool.name}')} {Gemma(lark, tool, quote).arguments()} {lark.literal(end)}"


def _lfm2(lark: Lark, tool: ForcedTool) -> str:
    """<|tool_call_start|>[f(x=1, y="text")]<|tool_call_end|>"""
    return f"{lark.literal(f'{tool.name}(')} {Keywords(lark, tool).arguments()} {lark.literal(')')}"


class _Notation(NamedTuple):
    """The rule of a call, and the text between two calls, before the first and behind the last."""

    call: Callable[[Lark, ForcedTool], str]
    between: str = ""
    before: str = ""
    after: str = ""


_NOTATIONS: Mapping[str | None, _Notation] = {
    "hermes": _Notation(_hermes, "\n"),
    "xml": _Notation(partial(_in_tags, tags=XML), "\n"),
    "minimax": _Notation(partial(_in_tags, tags=MINIMAX), "\n"),
    "dsml": _Notation(partial(_in_tags, tags=DSML), "\n"),
    "dsml4": _Notation(partial(_in_tags, tags=DSML_4), "\n"),
    "muse": _Notation(_muse, MUSE_END),
    "seed": _Notation(partial(_in_tags, tags=SEED), "\n"),
    "harmony": _Notation(_harmony),
    "mistral": _Notation(_mistral),
    "gemma": _Notation(_gemma),
    "glm": _Notation(_glm, "\n"),
    "granite": _Notation(_granite, ", ", f"{GRANITE}[", "]"),
    "command": _Notation(_command, ",\n", f"{COMMAND}[\n", f"\n]{END_COMMAND}"),
    "lfm2": _Notation(_lfm2, ", ", f"{LFM2}[", f"]{END_LFM2}"),
    "deepseek": _Notation(_deepseek, "", DEEPSEEK.section, DEEPSEEK.end_section),
    "kimi": _Notation(_kimi, "", KIMI.section, KIMI.end_section),
}
