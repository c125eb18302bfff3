"""Every notation of calls: how a model writes arguments in it, how they are read, and how its grammar ends a text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from mlx_specprefill_server.notations.formats import Format


class Number(str):
    """A number as it is written."""


def exactly(text: str) -> Any:
    """Return a JSON text's value with the digits of its numbers."""
    return json.loads(text, parse_float=Number, parse_int=Number)


def as_json(value: Any) -> str:
    match value:
        case Number():
            return str(value)
        case dict():
            return (
                "{"
                + ", ".join(
                    f"{json.dumps(name, ensure_ascii=False)}: {as_json(inner)}" for name, inner in value.items()
                )
                + "}"
            )
        case list():
            return "[" + ", ".join(map(as_json, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def is_text(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(value, Number)


def plain(value: Any) -> str:
    """Text as it is, every other value as JSON."""
    return value if is_text(value) else as_json(value)


def gemma(quote: str) -> Callable[[Any], str]:
    def key(name: str) -> str:
        return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else f"{quote}{name}{quote}"

    def written(value: Any) -> str:
        match value:
            case str() if is_text(value):
                return f"{quote}{value}{quote}"
            case dict():
                return "{" + ",".join(f"{key(name)}:{written(inner)}" for name, inner in value.items()) + "}"
            case list():
                return "[" + ",".join(map(written, value)) + "]"
        return as_json(value)

    return written


def tags(begin: str, between: str, end: str, closed: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda given: begin + "".join(f"{between % name}{plain(v)}{end}" for name, v in given.items()) + closed


@dataclass(frozen=True)
class Notation:
    """One notation. `write` returns a call of the tool `f`; `ends` are the ends of a text in it."""

    format: Format
    write: Callable[[Mapping[str, Any]], str]
    ends: tuple[str, ...] = ('"',)
    prompt: str = ""

    @property
    def forced(self) -> Callable[[Mapping[str, Any]], str]:
        """The writer of forced calls, which are JSON."""
        return self.write if self.format.tools in WITH_JSON else NOTATIONS["hermes"].write


def _of(parser: str, write: Callable[[Mapping[str, Any]], str], *ends: str) -> Notation:
    return Notation(Format(parser, None), write, ends or ('"',))


def keywords(given: Mapping[str, Any]) -> str:
    return f"<|tool_call_start|>[f({', '.join(f'{name}={as_json(v)}' for name, v in given.items())})]<|tool_call_end|>"


def dsml(tag: str) -> Callable[[Mapping[str, Any]], str]:
    def parameter(name: str, value: Any) -> str:
        kind = str(is_text(value)).lower()
        return f'<｜DSML｜parameter name="{name}" string="{kind}">{plain(value)}</｜DSML｜parameter>\n'

    def written(given: Mapping[str, Any]) -> str:
        inner = "".join(parameter(name, value) for name, value in given.items())
        return f'<｜DSML｜{tag}>\n<｜DSML｜invoke name="f">\n{inner}</｜DSML｜invoke>\n</｜DSML｜{tag}>'

    return written


WITH_JSON = ("hermes", "granite", "command", "deepseek", "mistral", "harmony", "kimi")
GEMMA, OLD_GEMMA = gemma('<|"|>'), gemma("<escape>")
NOTATIONS = {
    "hermes": _of("hermes", lambda given: f'<tool_call>\n{{"name": "f", "arguments": {as_json(given)}}}\n</tool_call>'),
    "llama": _of("hermes", lambda given: f'<|python_tag|>{{"name": "f", "parameters": {as_json(given)}}}'),
    "xml": _of(
        "xml",
        tags("<tool_call>\n<function=f>\n", "<parameter=%s>\n", "\n</parameter>\n", "</function>\n</tool_call>"),
        "\n</parameter>\n",
    ),
    "minimax": _of(
        "minimax",
        tags(
            '<minimax:tool_call>\n<invoke name="f">\n',
            '<parameter name="%s">',
            "</parameter>\n",
            "</invoke>\n</minimax:tool_call>",
        ),
        "</parameter>\n",
    ),
    "muse": _of(
        "muse",
        tags(
            ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n',
            '<atem:parameter name="%s">',
            "</atem:parameter>\n",
            "</atem:invoke>\n</atem:function_calls>",
        ),
        "</atem:parameter>\n",
    ),
    "seed": _of(
        "seed",
        tags("<seed:tool_call>\n<function=f>\n", "<parameter=%s>", "</parameter>\n", "</function>\n</seed:tool_call>"),
        "</parameter>\n",
    ),
    "granite": _of("granite", lambda given: f'<|tool_call|>[{{"name": "f", "arguments": {as_json(given)}}}]'),
    "command": _of(
        "command",
        lambda given: (
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": '
            f"{as_json(given)}}}\n]<|END_ACTION|>"
        ),
    ),
    "deepseek": _of(
        "deepseek",
        lambda given: (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
            f"{as_json(given)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    "deepseek-v3": _of(
        "deepseek",
        lambda given: (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            f"{as_json(given)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    "dsml": _of("dsml", dsml("function_calls"), "</｜DSML｜parameter>\n"),
    "dsml4": _of("dsml4", dsml("tool_calls"), "</｜DSML｜parameter>\n"),
    "functionary": _of("xml", lambda given: f"<function=f>{as_json(given)}</function>"),
    "glm": _of(
        "glm",
        tags("<tool_call>f", "\n<arg_key>%s</arg_key>\n<arg_value>", "</arg_value>", "\n</tool_call>"),
        "</arg_value>",
    ),
    "mistral": _of("mistral", lambda given: f'[TOOL_CALLS] [{{"name": "f", "arguments": {as_json(given)}}}]'),
    "mistral-args": _of("mistral", lambda given: f"[TOOL_CALLS]f[ARGS]{as_json(given)}"),
    "gemma": _of("gemma", lambda given: f"<|tool_call>call:f{GEMMA(given)}<tool_call|>", '<|"|>'),
    "functiongemma": _of(
        "gemma", lambda given: f"<start_function_call>call:f{OLD_GEMMA(given)}<end_function_call>", "<escape>"
    ),
    "harmony": _of(
        "harmony",
        lambda given: f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{as_json(given)}",
    ),
    "kimi": _of(
        "kimi",
        lambda given: (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
            f"{as_json(given)}<|tool_call_end|><|tool_calls_section_end|>"
        ),
    ),
    "lfm2": _of("lfm2", keywords),
}
# Their grammars are written for tokenizers with other markers than the tests' one.
FORCED = [name for name in NOTATIONS if name not in ("llama", "mistral-args", "functiongemma", "deepseek-v3",
          "functionary")]  # fmt: skip
EVERY = 5  # in every run, each case is tried in a fifth of the notations


def in_all(count: int, names: Sequence[str], *marks: pytest.MarkDecorator) -> list[Any]:
    """Every case, by its number, in every notation: with `marks` off a diagonal that has all cases and notations."""
    return [
        pytest.param(case, name, marks=() if (case + at) % EVERY == 0 else marks)
        for case in range(count)
        for at, name in enumerate(names)
    ]
