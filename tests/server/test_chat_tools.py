"""Tool calls and reasoning in chat completions, as the wire has them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.testclient import TestClient

from mlx_specprefill import GenerationRequest

from .conftest import client_of
from .fakes import FakeEngine, FakePair, Step, byte_tokenizer
from .parsers.reading import TOOLS
from .parsers.test_formats import CALL, HARMONY, PARIS, XML, native_tokenizer
from .templates import HARMONY as HARMONY_TEMPLATE
from .templates import QWEN_3
from .test_chat import ask, refusal, stream

TWO = f"I ask.\n{CALL}\n{CALL}"
BROKEN = '<tool_call>{"name": "get_weather", "arguments": {"city": "Par'


def message_of(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """Return the message that a client puts together from a stream, with the finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for choice in (choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["calls"])
                assert call["type"] == "function"
                message["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            message["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize(("fmt", "text"), [("hermes", CALL), ("xml", XML), ("harmony", HARMONY)])
def test_a_call_alone(engine: FakeEngine, fmt: str, text: str) -> None:
    engine.says(text)
    client = client_of(engine, tool_parser=fmt)
    body = ask(client, tools=TOOLS)
    ChatCompletion.model_validate(body, strict=True)
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "get_weather", "arguments": PARIS}


@pytest.mark.parametrize("fmt", ["minimax", "seed", "muse", "gemma", "lfm2", "dsml", "dsml4"])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_json_is_a_call_in_notations_without_it_where_it_is_forced(engine: FakeEngine, fmt: str, choice: str) -> None:
    engine.says(CALL)
    message = ask(client_of(engine, tool_parser=fmt), tools=TOOLS, tool_choice=choice)["choices"][0]["message"]
    called = [call["function"] for call in message.get("tool_calls") or ()]
    assert called == [{"name": "get_weather", "arguments": PARIS}] * (choice == "required")
    assert (message["content"] or "") == CALL * (choice == "auto")


def test_streamed_calls(client: TestClient, engine: FakeEngine) -> None:
    engine.says(TWO)
    chunks = stream(client, tools=TOOLS)
    for chunk in chunks[:-1]:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    message = message_of(chunks)
    assert message["content"] == "I ask."
    assert [(call["name"], call["arguments"]) for call in message["calls"]] == [("get_weather", PARIS)] * 2
    assert message["calls"][0]["id"] != message["calls"][1]["id"]
    assert message["finish_reason"] == "tool_calls"
    pieces = [
        c["delta"]["tool_calls"][0] for chunk in chunks[:-1] for c in chunk["choices"] if "tool_calls" in c["delta"]
    ]
    assert pieces[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert len(pieces) > 10  # the arguments come as they are generated, not at once
    assert all("name" not in piece["function"] for piece in pieces if "id" not in piece)


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_without_tools_or_with_none_to_be_called_the_text_stays_text(
    client: TestClient, engine: FakeEngine, choice: str
) -> None:
    engine.says(CALL)
    body = ask(client, tools=TOOLS if choice == "none" else [], tool_choice=choice)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"


def test_a_broken_call_comes_back_as_text(client: TestClient, engine: FakeEngine) -> None:
    engine.says(BROKEN)
    choice = ask(client, tools=TOOLS)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": BROKEN, "refusal": None}
    assert choice["finish_reason"] == "stop"
    message = message_of(stream(client, tools=TOOLS))
    assert (message["content"], message["finish_reason"]) == (BROKEN, "stop")
    with pytest.raises(json.JSONDecodeError):  # what had been passed on is nothing that a client could run
        json.loads(message["calls"][0]["arguments"])


def test_a_call_that_is_cut_off_ends_for_its_length(client: TestClient, engine: FakeEngine) -> None:
    engine.says(CALL, end=False)
    body = ask(client, tools=TOOLS, max_tokens=len(CALL) // 2)
    assert body["choices"][0]["finish_reason"] == "length"
    assert "tool_calls" not in body["choices"][0]["message"]
    assert CALL.startswith(body["choices"][0]["message"]["content"])


def test_parallel_calls_can_be_refused(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda request: [*engine.tokens(CALL, end=False), threading.Event(), *engine.tokens(CALL)]
    choice = ask(client, tools=TOOLS, parallel_tool_calls=False)["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert engine.idle()
    assert engine.reasons == ["cancelled"]


FORCED = [
    ("required", TOOLS),
    ({"type": "function", "function": {"name": "get_weather"}}, TOOLS),
]


@pytest.mark.parametrize(("choice", "tools"), FORCED)
def test_forced_calls_become_a_grammar(client: TestClient, engine: FakeEngine, choice: Any, tools: Any) -> None:
    engine.says(CALL)
    body = ask(client, tools=tools, tool_choice=choice)
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert "get_weather" in engine.requests[0].constraint.grammar


def test_a_call_is_forced_in_a_notation_that_is_read_where_the_models_own_has_no_grammar(engine: FakeEngine) -> None:
    engine.pair = FakePair(native_tokenizer())
    engine.says('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>')
    choice = ask(client_of(engine), tools=TOOLS, tool_choice="required")["choices"][0]
    assert engine.requests[0].constraint is not None
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], choice["message"]["content"]) == ("get_weather", None)


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ("required", []),
        ({"type": "function", "function": {"name": "other"}}, TOOLS),
        ("sometimes", TOOLS),
        ({"type": "function"}, TOOLS),
        ({"type": "allowed_tools"}, TOOLS),
    ],
)
def test_calls_that_cannot_be_forced(client: TestClient, choice: Any, tools: Any) -> None:
    assert refusal(client, tools=tools, tool_choice=choice)["param"] == "tool_choice"


def test_a_grammar_waits_for_the_end_of_reasoning_that_the_prompt_opened(engine: FakeEngine) -> None:
    opened = byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}<think>\n")
    engine.pair = FakePair(opened)
    ask(client_of(engine), response_format={"type": "json_object"})
    (end,) = opened.encode("</think>", add_special_tokens=False)
    assert engine.requests[0].constraint.starts_after == (end,)


@pytest.mark.parametrize(
    ("prompt", "fields", "thinks"),
    [
        ("", {}, True),
        ("", {"reasoning_effort": "none"}, False),
        ("", {"thinking": {"type": "disabled"}}, False),
        ("", {"reasoning": {"max_tokens": 0}}, False),
        ("", {"chat_template_kwargs": {"enable_thinking": False}}, False),
        ("<think>\\n\\n</think>\\n\\n", {}, False),
    ],
)
def test_a_model_that_opens_its_reasoning_itself_may_think_before_a_format(
    engine: FakeEngine, prompt: str, fields: Any, thinks: bool
) -> None:
    """Not where the request, or the prompt, says that it does not think."""
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{{ 'PROMPT' }}".replace("PROMPT", prompt)
    engine.pair = FakePair(byte_tokenizer(template))
    client = client_of(engine)
    ask(client, response_format={"type": "json_object"}, **fields)
    ask(client, tools=TOOLS, tool_choice="required", **fields)
    (opens,) = engine.pair.tokenizer.encode("<think>", add_special_tokens=False)
    for request in engine.requests:
        assert not request.constraint.starts_after
        assert (f"<[{opens}]>" in request.constraint.grammar) is thinks


def test_a_notation_that_nobody_knows_is_told_at_load(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine.pair = FakePair(byte_tokenizer("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"))
    (model,) = client_of(engine).get("/v1/models").json()["data"]
    assert model["tools"]["definitions"] is True
    assert model["tools"]["parsed"] == "none"
    assert "the notation of its tool calls is unknown" in caplog.text


@pytest.mark.parametrize(
    "mark", ["<TOOLCALL>", "<｜tool_calls_begin｜>", "<|python_start|>", '{"name"', "[func_name1("]
)
def test_a_notation_without_a_name_is_said_by_what_begins_it(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, mark: str
) -> None:
    engine.pair = FakePair(
        byte_tokenizer(f"{{{{ tools }}}}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{mark}")
    )
    (model,) = client_of(engine).get("/v1/models").json()["data"]
    assert model["tools"]["parsed"] == mark
    assert "unknown" not in caplog.text


def test_reasoning(client: TestClient, engine: FakeEngine) -> None:
    engine.says("<think>\nHm.\n</think>\n\nYes.")
    body = ask(client)
    ChatCompletion.model_validate(body, strict=True)
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "reasoning_content": "Hm.",
    }
    thought = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert thought == 1 + 5 + 1  # the two tags are one token each
    chunks = stream(client)
    message = message_of(chunks)
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
    assert not any("reasoning" in choice["delta"] for chunk in chunks[:-1] for choice in chunk["choices"])


def test_logprobs_are_those_of_the_visible_text(client: TestClient, engine: FakeEngine) -> None:
    engine.says("<think>Hm.</think>Yes.")
    content = ask(client, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "Yes."
    streamed = [
        c["logprobs"] for chunk in stream(client, logprobs=True)[:-1] for c in chunk["choices"] if c["logprobs"]
    ]
    assert [entry for one in streamed for entry in one["content"]] == content


def test_harmony(engine: FakeEngine) -> None:
    engine.pair = FakePair(byte_tokenizer(HARMONY_TEMPLATE, eos="<|return|>"))
    engine.says("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.")
    message = ask(client_of(engine))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    ends = {engine.pair.tokenizer.convert_ids_to_tokens([token])[0] for token in engine.requests[0].stop_token_ids}
    assert ends == {"<|return|>", "<|call|>"}


def test_several_answers(client: TestClient, engine: FakeEngine) -> None:
    def script(request: GenerationRequest) -> Iterable[Step]:
        return engine.tokens(CALL if request.sampling.seed == 8 else "Hello")

    engine.script = script
    body = ask(client, n=3, seed=7, tools=TOOLS)
    ChatCompletion.model_validate(body, strict=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "tool_calls", "stop"]
    assert [request.sampling.seed for request in engine.requests] == [7, 8, 9]
    assert body["usage"]["prompt_tokens"] == len(engine.requests[0].prompt)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    chunks = stream(client, n=3, seed=7, tools=TOOLS, stream_options={"include_usage": True})
    messages = [message_of(chunks, index) for index in range(3)]
    assert [message["finish_reason"] for message in messages] == ["stop", "tool_calls", "stop"]
    assert [message["content"] for message in messages] == ["Hello", "", "Hello"]
    roles = [c["index"] for chunk in chunks[:-1] for c in chunk["choices"] if c["delta"].get("role")]
    assert roles == [0, 1, 2]
    assert sum("usage" in chunk and chunk["usage"] is not None for chunk in chunks[:-1]) == 1


def test_a_parser_that_fails_ends_its_answer(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, text: str) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("mlx_specprefill_server.parsers.base.Parser.push", broken)
    chunks = stream(client)
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert "a bug" in chunks[-2]["engine_error"]["message"]
    assert engine.idle()
    monkeypatch.undo()
    assert ask(client)["choices"][0]["message"]["content"] == "Hello"


def test_token_ids_of_reasoning_and_calls(client: TestClient, engine: FakeEngine) -> None:
    text = f"<think>Hm.</think>{CALL}"
    engine.says(text)
    ids = engine.pair.tokenizer.encode(text, add_special_tokens=False)
    assert ask(client, tools=TOOLS, return_token_ids=True)["choices"][0]["token_ids"] == ids
    chunks = stream(client, tools=TOOLS, return_token_ids=True)[:-1]
    assert [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]] == ids


OTHER = {"type": "function", "function": {"name": "other"}}
WEATHER = [tool for tool in TOOLS if tool["function"]["name"] == "get_weather"]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture
def showing(engine: FakeEngine) -> TestClient:
    """Return a client of a model whose template shows the tools."""
    engine.pair.tokenizer = byte_tokenizer(QWEN_3)
    return client_of(engine)


def test_only_the_allowed_tools_are_offered(showing: TestClient, engine: FakeEngine) -> None:
    ask(showing, tools=WEATHER)
    ask(showing, tools=[OTHER, *WEATHER], tool_choice=allowed("auto", "get_weather"))
    ask(showing, tools=[OTHER, *WEATHER], tool_choice="auto")
    alone, limited, both = (request.prompt.tolist() for request in engine.requests)
    assert alone == limited != both
    assert engine.requests[1].constraint is None


def test_one_of_the_allowed_tools_can_be_demanded(client: TestClient, engine: FakeEngine) -> None:
    engine.says(CALL)
    body = ask(client, tools=[OTHER, *WEATHER], tool_choice=allowed("required", "get_weather"))
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert "get_weather" in engine.requests[0].constraint.grammar
    assert "other" not in engine.requests[0].constraint.grammar


def test_a_template_without_tools_is_told(client: TestClient, showing: TestClient, engine: FakeEngine) -> None:
    """In the list of models, and with each answer whose request brings some; the model can't know of them."""
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for one, takes in ((client, False), (showing, True)):
        (model,) = one.get("/v1/models").json()["data"]
        assert model["tools"]["definitions"] is takes
        (warning,) = one.post("/v1/chat/completions", json=body | {"tools": WEATHER}).json().get("warnings", [None])
        assert (warning is None) == takes
        assert "warnings" not in one.post("/v1/chat/completions", json=body).json()


def test_the_count_is_that_of_the_offered_tools(showing: TestClient, engine: FakeEngine) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [OTHER, *WEATHER]}
    counts = []
    for choice in ("auto", "none", allowed("auto", "get_weather")):
        counted = showing.post("/v1/chat/completions/input_tokens", json=body | {"tool_choice": choice}).json()
        showing.post("/v1/chat/completions", json=body | {"tool_choice": choice})
        counts.append(len(engine.requests[-1].prompt))
        assert counted["input_tokens"] == counts[-1]
    assert len(set(counts)) == 3


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_template_without_tools_is_warned_of_whatever_is_chosen(client: TestClient, choice: Any) -> None:
    assert "no place for tools" in " ".join(ask(client, tools=TOOLS, tool_choice=choice)["warnings"])
