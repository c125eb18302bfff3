"""Tools that are loaded when needed: lossless for the model, and without a trace in the prefix cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from benchmarks.harness.agent_sessions import TEMPLATE

from tests.support.serving import Server, start

from .conftest import PAIR, filler

pytestmark = pytest.mark.extended

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"service_{i}",
            "description": " ".join(filler(40, seed=i)),
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
    for i in range(8)
]
FINDER: dict[str, Any] = {"type": "function", "function": {"name": "find_tools", "description": "Finds tools."}}
ASKED = {"role": "user", "content": " ".join(filler(1200, seed=99)) + " What does the third service say?"}
FOUND = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "find_tools", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "tool_reference", "tool_name": "service_3"}]},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundled pair with a template that shows tools."""
    folder = tmp_path_factory.mktemp("tools")
    shutil.copytree(PAIR[0], folder / "target")
    settings = folder / "target" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    with start(folder / "log", folder / "target", None) as running:
        yield running


def deferred(*tools: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**tool, "defer_loading": True} for tool in tools]


def ask(server: Server, salt: str, messages: list[Any], tools: list[Any]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "tools": tools,
        "max_tokens": 4,
        "cache_salt": salt,
        "specprefill": False,
        "logprobs": True,
        "top_logprobs": 20,
    }
    body["messages"] = [{"role": "system", "content": "You help."}, *messages]
    answer = httpx.post(f"{server.base}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_model_sees_what_it_would_see_with_the_loaded_tool_alone(server: Server) -> None:
    many = ask(server, "many", [ASKED, *FOUND], [FINDER, *deferred(*TOOLS)])
    one = ask(server, "one", [ASKED, *FOUND], [FINDER, *deferred(TOOLS[3])])
    assert many["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert many["choices"][0]["logprobs"]["content"] == one["choices"][0]["logprobs"]["content"]
    none = ask(server, "none", [ASKED], [FINDER, *deferred(*TOOLS)])
    assert none["choices"][0]["logprobs"] == ask(server, "bare", [ASKED], [FINDER])["choices"][0]["logprobs"]


@pytest.mark.parametrize("waiting", [deferred(*TOOLS), []], ids=["deferred", "plain"])
def test_turn_two_continues_from_the_cache_of_turn_one(server: Server, waiting: list[Any]) -> None:
    salt, tools = f"turns{len(waiting)}", [FINDER, *(waiting or TOOLS)]
    result = FOUND[1] if waiting else {**FOUND[1], "content": "It is the third."}
    first = ask(server, salt, [ASKED], tools)
    second = ask(server, salt, [ASKED, FOUND[0], result], tools)
    third = ask(server, salt, [ASKED, FOUND[0], result, {"role": "user", "content": "Well?"}], tools)
    assert cached(first) == 0
    assert cached(second) > first["usage"]["prompt_tokens"] - 16  # but for the answer's beginning
    assert cached(third) > second["usage"]["prompt_tokens"] - 16


def test_a_tool_that_was_added_in_front_is_named_as_the_cause(server: Server) -> None:
    turns = [ASKED, *FOUND]
    ask(server, "front", turns, [FINDER, *deferred(*TOOLS)])
    again = ask(server, "front", turns, [FINDER, TOOLS[5], *deferred(*TOOLS[:5], *TOOLS[6:])])
    miss = again["specprefill"]["cache"]["miss"]
    assert miss["role"] in ("system", "tools")
    assert miss["kind"] == "edited"
    assert "service_5" in miss["now"], miss
