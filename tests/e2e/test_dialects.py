"""Every script over the Responses and Messages dialects: each says the same of what the model writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.support.scripted import SCRIPTS, Flavour, Turn
from tests.support.serving import Server

TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["city"],
    },
}


def typed(turn: Turn) -> bool:
    """XML has no types of its own: what a tool gets that the request does not describe is text."""
    others = [call for call in turn.calls if call.name != TOOL["name"]]
    return all(isinstance(value, str) for call in others for value in call.arguments.values())


WRITTEN = [
    name
    for name, script in SCRIPTS.items()
    if not script.endless and not script.turns[0].raw and typed(script.turns[0])
]
SLIPS = {"no-outer-tag", "no-last-end"}  # calls all the same
BROKEN = {"malformed", "unclosed"}
Said = tuple[str, str, list[tuple[str, Any]]]  # reasoning, text, calls
Ask = Callable[..., Said]
FLAVOURS = pytest.mark.parametrize("flavour", ["hermes", pytest.param("xml", marks=pytest.mark.extended)])
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


def expected(turn: Turn) -> Said:
    return turn.reasoning, turn.text.strip(), [(call.name, dict(call.arguments)) for call in turn.calls]


@pytest.fixture(params=["messages", pytest.param("responses", marks=pytest.mark.extended)])
def said(request: pytest.FixtureRequest, scripted: Callable[[Flavour], Server]) -> Ask:
    """Asks for a script in one of the dialects."""

    def ask(flavour: Flavour, name: str, streamed: bool) -> Said:
        base = scripted(flavour).base
        return {"responses": _responses, "messages": _messages}[request.param](base, name, streamed)

    return ask


def _responses(base: str, name: str, streamed: bool) -> Said:
    fields: Any = {"model": "m", "input": f"script:{name}", "tools": [{"type": "function", "strict": False, **TOOL}]}
    with openai.OpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as client:
        if streamed:
            with client.responses.stream(**fields) as stream:
                answer: Any = stream.get_final_response()
        else:
            answer = client.responses.create(**fields)
    assert answer.status == "completed"
    thought = [part.text for item in answer.output if item.type == "reasoning" for part in item.content]
    announced = [item for item in answer.output if item.type == "function_call"]
    calls = [(item.name, json.loads(item.arguments)) for item in announced if item.status == "completed"]
    broken = [item.name for item in announced if item.status == "incomplete"]  # it was announced before it broke
    assert answer.model_extra["specprefill"]["prompt_tokens"] == answer.usage.input_tokens
    return "".join(thought).strip(), " ".join([answer.output_text.strip(), *broken]), calls


def _messages(base: str, name: str, streamed: bool) -> Said:
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    messages = [{"role": "user", "content": f"script:{name}"}]
    fields: Any = {"model": "m", "max_tokens": 1000, "messages": messages, "tools": [tool]}
    with anthropic.Anthropic(base_url=base, api_key="k", max_retries=0) as client:
        if streamed:
            with client.messages.stream(**fields) as stream:
                answer: Any = stream.get_final_message()
        else:
            answer = client.messages.create(**fields)
    calls = [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == ("tool_use" if calls else "end_turn")
    thought = "".join(block.thinking for block in answer.content if block.type == "thinking")
    return thought.strip(), "".join(block.text for block in answer.content if block.type == "text").strip(), calls


@pytest.mark.extended
@FLAVOURS
@STREAMED
def test_what_the_model_writes_arrives(said: Ask, flavour: Flavour, streamed: bool) -> None:
    for name in WRITTEN:
        assert said(flavour, name, streamed) == expected(SCRIPTS[name].turns[0]), name


@FLAVOURS
def test_slips_are_calls_and_broken_calls_are_text(said: Ask, flavour: Flavour) -> None:
    for name in SLIPS:
        assert said(flavour, name, streamed=False)[2] == [("get_weather", {"city": "Paris"})], name
    for name in BROKEN:
        _, text, calls = said(flavour, name, streamed=False)
        assert calls == [], name
        assert text.startswith("Let me see."), name
        assert "Par" in text or "get_weather" in text, name
