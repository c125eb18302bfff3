"""An agent's whole conversation in either dialect: it asks, the model calls tools, it answers, the model concludes."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from .fakes import FakeEngine, FakePair, byte_tokenizer
from .templates import QWEN_3

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
}
CALL = '<tool_call>\n{{"name": "read", "arguments": {{"path": "{0}.txt"}}}}\n</tool_call>'
FIRST = f"<think>\nI read both.\n</think>\n\nReading.\n{CALL.format('a')}\n{CALL.format('b')}"
LAST = "<think>\nNow I know.\n</think>\n\nThey say A and B."


@pytest.fixture
def engine() -> Any:
    """Calls two tools, and concludes when it has seen both results."""
    fake = FakeEngine(FakePair(byte_tokenizer(QWEN_3)))

    def script(request: Any) -> Any:
        prompt = fake.pair.tokenizer.decode(list(request.prompt))
        seen = "<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response>" in prompt
        return fake.tokens(LAST if seen else FIRST)

    fake.script = script
    yield fake
    fake.close()


def last_prompt(engine: FakeEngine) -> str:
    text: str = engine.pair.tokenizer.decode(list(engine.requests[-1].prompt))
    return text


def check_prompt(prompt: str) -> None:
    """Check that the prompt repeats the model's own text, except for white space of the template."""
    assert prompt.count("<tool_call>\n{") == 2
    assert "<think>\nI read both.\n</think>\n\nReading.\n<tool_call>" in prompt


@pytest.mark.parametrize(("streamed", "kept"), [(False, "content"), (True, "content"), (True, "encrypted_content")])
def test_responses(base: str, engine: FakeEngine, streamed: bool, kept: str) -> None:
    """Some clients keep only the form of reasoning that they can't read."""
    items: Any = [{"role": "user", "content": "Read a and b."}]
    fields: Any = {
        "model": "m",
        "input": items,
        "store": False,
        "include": [f"reasoning.{kept}"] if kept == "encrypted_content" else [],
        "tools": [
            {"type": "web_search"},
            {"type": "function", "name": "read", "parameters": PARAMETERS, "strict": False},
        ],
    }

    def turn(client: openai.OpenAI) -> Any:
        if not streamed:
            return client.responses.create(**fields)
        with client.responses.stream(**fields) as stream:
            return stream.get_final_response()

    with openai.OpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as client:
        first = turn(client)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert first.output[0].content[0].text.strip() == "I read both."
        assert first.output_text.strip() == "Reading."
        assert first.usage.output_tokens_details.reasoning_tokens > 0
        assert first.output[0].encrypted_content is None or kept == "encrypted_content"
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items[1] = {"type": "reasoning", "summary": [], kept: items[1].get(kept)}
        for item in first.output[2:]:
            path = json.loads(item.arguments)["path"]
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": path[0].upper()})
        last = turn(client)
    check_prompt(last_prompt(engine))
    assert last.status == "completed"
    assert last.output_text.strip() == "They say A and B."
