"""The grammar of an answer: its required form, its calls by the tool choice, and the reasoning before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_specprefill import Constraint

from ..http.errors import refusal
from ..prompt.deferred import tool_name
from .call_grammars import answer_with_calls, calls_rule
from .lark import Lark
from .output_format import OutputFormat
from .tool_choice import ToolChoice, forced_tools

_LINES = r"/\n{1,2}/"  # between reasoning and what must be JSON or a call


def constraint_of(
    output: OutputFormat | None,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: ToolChoice = "auto",
    tool_format: str | None = None,
    parallel: bool = True,
    reasoning_end: tuple[int, ...] = (),
    think: tuple[str, str] | None = None,
    special: Mapping[str, int] | None = None,
    warnings: list[str] | None = None,
) -> Constraint:
    """Return the grammar of the whole answer after its reasoning, where `output` or `tool_choice` asks for one.

    Forced calls leave no room for other text. With optional calls, the answer is either calls or text in the form of
    `output`. The client's own grammar describes the whole answer.

    Args:
        tools: OpenAI's function tools.
        tool_format: how the model writes calls (the name of a parser); None: it knows none.
        parallel: more than one call is possible.
        reasoning_end: the tokens that end the reasoning, if the answer begins within some.
        think: the tags around reasoning that the model may write first.
        special: the tokenizer's added tokens and their ids; markers among them are tokens, not text.
        warnings: list that gets a sentence for each part of a schema that is not enforced.

    Raises:
        InvalidRequestError: the named tool does not exist, or no call of a tool can follow its schema.
    """
    forced = forced_tools(tools, tool_choice)
    if output is not None and output.kind == "grammar" and not forced:
        if tool_format == "harmony":
            raise refusal(output.field, "this model answers in channels; use a JSON schema, a regex or a choice")
        return Constraint(output.value, output.field, reasoning_end)
    field = "tools" if output is None or forced else output.field
    lark = Lark(special or {}, field)
    possible = forced or (tools if tool_choice == "auto" else ())
    rules = [calls_rule(lark, possible, tool_format, parallel and isinstance(tool_choice, str))] if possible else []
    if output is not None and not forced:
        rules.append(_body(lark, output, tool_format))
    if think and tool_format == "muse":
        think = f" {think[0]}", think[1]  # the prompt ends before the space
    before = _reasoning(lark, reasoning_end, think, output is None or bool(forced) or output.kind.startswith("json"))
    lark.define("start", f"{before}({' | '.join(rules)})")
    if warnings is not None:
        warnings.extend(lark.warnings)
    return Constraint(lark.text(), field, reasoning_end)


def free_constraint(
    tools: Sequence[Mapping[str, Any]],
    tool_format: str | None,
    special: Mapping[str, int],
    objection: Callable[[Constraint], str],
    warnings: list[str],
) -> Constraint | None:
    """Return the grammar of an answer in which calls of these tools follow their schemas, and all else is free.

    Args:
        objection: returns what speaks against a grammar, "" for nothing.
        warnings: get a sentence where there is no such grammar, for which None is returned.
    """
    lark = Lark(special, "tools")
    names = ", ".join(map(tool_name, tools))
    if not answer_with_calls(lark, tools, tool_format):
        warnings.append(f"tools: in this model's notation the grammar of {names} is enforced in forced calls only")
        return None
    warnings.extend(lark.warnings)
    constraint = Constraint(lark.text(), "tools")
    if why := objection(constraint):
        warnings.append(f"tools: the grammar of {names} is not enforced: {why}")
        return None
    return constraint


def _reasoning(lark: Lark, end: tuple[int, ...], think: tuple[str, str] | None, lines: bool) -> str:
    """Return what may stand before the answer proper: reasoning that the model opens, and `lines` behind any."""
    behind = f"{lark.define('NL', _LINES)}? " if lines and (end or think) else ""
    if end or think is None:
        return behind
    opens, closes = think
    return f"({lark.literal(opens)} {lark.free_text(closes)} {behind})? "


def _body(lark: Lark, output: OutputFormat, tool_format: str | None) -> str:
    """Return the rule of the answer's text. Harmony's models write it into a channel of its own, Muse to the user."""
    body = {
        "json_object": lambda: lark.json({"type": "object"}),
        "json_schema": lambda: lark.json(output.value, output.strict, output.field),
        "regex": lambda: lark.regex(output.value),
        "choice": lambda: lark.any_of(output.value),
    }[output.kind]()
    if tool_format == "muse":
        return lark.rule("final", f"{lark.muse_head('user')} {body}")
    if tool_format != "harmony":
        return body
    return lark.rule("final", f"{lark.analysis()} {lark.literal('<|channel|>final<|message|>')} {body}")
