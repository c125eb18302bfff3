"""Reads texts with any parser, in any pieces, and says what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from mlx_specprefill_server.deltas import (
    CallBroken,
    CallDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    ReasoningDelta,
    TextDelta,
)
from mlx_specprefill_server.notations.formats import Format

THINK = ("<think>", "</think>")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = [
    tool("get_weather", city=STRING, days=INTEGER, exact={"type": "boolean"}, options={"type": "object"}),
    tool("write", path=STRING, content=STRING),
    tool("now"),
]


@dataclass
class Read:
    """The result of parsing a text. `shape` has one letter per run of deltas: r(easoning), t(ext), c(all), f(ailed)."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)
    shape: str = ""
    said: list[TextDelta | ReasoningDelta] = field(default_factory=list)


def read(
    fmt: str | None,
    text: str,
    cuts: Sequence[int] = (),
    *,
    think: tuple[str, str] | None = THINK,
    prompt: str = "",
    tools: Sequence[dict[str, Any]] = TOOLS,
    complete: bool = True,
) -> Read:
    """Feeds `text` in the pieces that `cuts` make."""
    parser = Format(fmt, think).parser(tools, prompt)
    deltas: list[ContentDelta] = []
    for start, end in pairwise([0, *sorted(cuts), len(text)]):
        deltas += parser.push(text[start:end])
    return collected(deltas + parser.finish(complete))


def collected(deltas: Sequence[ContentDelta]) -> Read:
    out, name, written = Read(), "", ""
    for delta in deltas:
        match delta:
            case TextDelta() | ReasoningDelta():
                out.said.append(delta)
                reasoning = isinstance(delta, ReasoningDelta)
                out.reasoning += delta.text if reasoning else ""
                out.text += "" if reasoning else delta.text
                letter = "r" if reasoning else "t"
                out.shape += "" if out.shape.endswith(letter) else letter
            case CallStart():
                assert not name, "a call opened inside another"
                name, written = delta.name, ""
            case CallDelta():
                assert name, "arguments without a call"
                written += delta.text
            case CallEnd():
                assert delta.arguments == written
                out.calls.append((name, written))
                out.shape, name = out.shape + "c", ""
            case CallBroken():
                out.broken.append((name, written))
                out.shape, name = out.shape + "f", ""
    assert not name, "a call was left open"
    return out
