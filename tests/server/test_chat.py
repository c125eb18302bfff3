from __future__ import annotations

import json
import threading
from fractions import Fraction
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.testclient import TestClient

from mlx_specprefill import SPECULATION_NAMES, Failed, InvalidRequestError, Progress

from .conftest import client_of, events
from .fakes import FakeEngine, FakePair, byte_tokenizer, comparable, report_of

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def ask(client: TestClient, **fields: Any) -> Any:
    answer = client.post(URL, json={"messages": HI, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client: TestClient, **fields: Any) -> list[Any]:
    answer = client.post(URL, json={"messages": HI, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


def text_of(chunks: list[Any]) -> str:
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def refusal(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post(URL, json={"messages": HI, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.headers["x-should-retry"] == "false"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def test_a_whole_answer(client: TestClient, engine: FakeEngine) -> None:
    body = ask(client)
    ChatCompletion.model_validate(body, strict=True)
    assert body["object"] == "chat.completion"
    assert body["model"] == "demo/target"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt_tokens = len(engine.requests[0].prompt)
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 6,
        "total_tokens": prompt_tokens + 6,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_the_prompt_is_the_rendered_template_with_its_spans(client: TestClient, engine: FakeEngine) -> None:
    ask(client)
    request = engine.requests[0]
    assert engine.pair.tokenizer.decode(list(request.prompt)) == PROMPT
    assert [span.kind for span in request.spans] == ["user"]
    assert request.stop_token_ids == {engine.pair.tokenizer.eos_token_id}


def test_a_streamed_answer(client: TestClient) -> None:
    chunks = stream(client)
    assert chunks[-1] == "[DONE]"
    for chunk in chunks[:-1]:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["object"] == "chat.completion.chunk"
        assert all("delta" in choice for choice in chunk["choices"])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in chunks[1:-1])
    assert text_of(chunks) == "Hello"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1


def test_the_report_is_in_the_last_chunk_with_and_without_usage(client: TestClient) -> None:
    bare = stream(client)
    assert "usage" not in bare[-2]
    assert bare[-2]["specprefill"]["mode"] == "full"
    assert not any("specprefill" in chunk for chunk in bare[:-2])
    asked = stream(client, stream_options={"include_usage": True})
    assert asked[-2]["choices"] == []
    assert asked[-2]["usage"]["completion_tokens"] == 6
    assert asked[-2]["specprefill"]["mode"] == "full"
    assert all(chunk["usage"] is None for chunk in asked[:-2])
    assert not any("specprefill" in chunk for chunk in asked[:-2])
    assert asked[-3]["choices"][0]["finish_reason"] == "stop"


def test_the_report_has_every_field(client: TestClient) -> None:
    report = ask(client, specprefill=True, specprefill_return_spans=True)["specprefill"]
    n = report["prompt_tokens"]
    times = {"queue_ms": 0, "draft_ms": 1, "select_ms": 2, "prefill_ms": 3, "ttft_ms": 7, "decode_ms": 4}
    assert (
        report.items()
        >= {
            "mode": "sparse",
            "reason": "asked for",
            "prompt_tokens": n,
            "kept_tokens": n // 2,
            "cached_tokens": 1,
            "kept_share": 0.5,
            "keep_pct": 0.5,
            "timings": times,
            "kept_spans": [[0, n // 2]],
        }.items()
    )
    assert "kept_spans" not in ask(client)["specprefill"]


def test_timings_have_llama_cpps_shape(client: TestClient) -> None:
    body = ask(client)
    timings = body["timings"]
    assert timings["prompt_ms"] == 6
    assert timings["predicted_ms"] == 4
    assert timings["prompt_n"] + timings["cache_n"] == body["usage"]["prompt_tokens"]
    assert timings["predicted_n"] == 6
    assert timings["predicted_per_second"] == 1500
    assert stream(client)[-2]["timings"] == timings


@pytest.mark.parametrize(("sent", "enabled"), [(True, True), (False, False), (None, None)])
def test_specprefill_reaches_the_engine(client: TestClient, engine: FakeEngine, sent: Any, enabled: Any) -> None:
    ask(client, specprefill=sent, specprefill_keep_pct=0.07)
    assert engine.requests[0].specprefill.enabled is enabled
    assert engine.requests[0].specprefill.keep_pct == Fraction(7, 100)


@pytest.mark.parametrize("sent", [*SPECULATION_NAMES, None])
def test_the_way_to_draft_reaches_the_engine(client: TestClient, engine: FakeEngine, sent: Any) -> None:
    ask(client, speculative=sent)
    assert engine.requests[0].specprefill.speculative == sent


def test_an_unknown_way_to_draft_is_refused_with_those_there_are(client: TestClient) -> None:
    for gone in ("auto", "retrieval"):
        answer = client.post(URL, json={"messages": HI, "speculative": gone})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "speculative"
        assert all(f"'{name}'" in answer.json()["error"]["message"] for name in SPECULATION_NAMES)


def test_absent_fields_and_nulls_are_the_defaults(client: TestClient, engine: FakeEngine) -> None:
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens", "n",
             "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs",
             "stream", "stream_options", "tools", "tool_choice", "response_format", "specprefill", "model",
             "specprefill_keep_pct", "specprefill_return_spans", "reasoning_effort", "chat_template_kwargs", "user",
             "ignore_eos", "return_progress")  # fmt: skip
    ask(client)
    ask(client, **dict.fromkeys(names))
    assert comparable(engine.requests[0]) == comparable(engine.requests[1])
    assert engine.requests[0].specprefill.enabled is None
    assert engine.requests[0].sampling.temperature == 0


def test_sampling_fields_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    ask(client, temperature=1, top_p=0.5, top_k=7.0, min_p=0.1, seed=3, repetition_penalty=1.1, presence_penalty=-1,
        frequency_penalty=2, logit_bias={"65": -100, "66": 1.5})  # fmt: skip
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 0.5, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, -1, 2)
    assert sampling.logit_bias == {65: -100.0, 66: 1.5}
    assert sampling.seed == 3


def test_off_values_of_other_servers(client: TestClient, engine: FakeEngine) -> None:
    ask(client, top_k=-1, seed=-1, n_predict=-1)
    request = engine.requests[0]
    assert (request.sampling.top_k, request.sampling.seed) == (0, None)
    assert request.max_tokens == engine.pair.context_length - len(request.prompt)
    ask(client, top_k=10**9)
    assert engine.requests[1].sampling.top_k == len(engine.pair.tokenizer)


def test_the_default_temperature_is_a_setting(engine: FakeEngine) -> None:
    ask(client_of(engine, temperature=0.7))
    assert engine.requests[0].sampling.temperature == 0.7


def test_the_model_says_how_it_is_sampled_and_a_request_or_the_setting_says_otherwise(engine: FakeEngine) -> None:
    engine.pair.sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    client = client_of(engine)
    assert client.get("/v1/models").json()["data"][0]["sampling"] == engine.pair.sampling
    ask(client)
    ask(client, temperature=0, top_p=1, top_k=0, repeat_penalty=1)
    ask(client_of(engine, temperature=0.2))
    taken = [request.sampling for request in engine.requests]
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    assert [tuple(getattr(one, name) for name in names) for one in taken] == [
        (0.6, 0.9, 20, 1.05),
        (0, 1, 0, 1),
        (0.2, 0.9, 20, 1.05),
    ]


def test_a_models_sampling_that_means_nothing_is_told_and_left_alone(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.pair.sampling = {"temperature": 0.6, "top_p": 7}
    ask(client_of(engine))
    assert engine.requests[0].sampling.temperature == 0
    assert "generation_config.json is not followed: top_p" in caplog.text


def test_max_tokens_is_cut_to_the_room_left(client: TestClient, engine: FakeEngine) -> None:
    ask(client, max_tokens=32000)
    ask(client)
    room = engine.pair.context_length - len(engine.requests[0].prompt)
    assert [request.max_tokens for request in engine.requests] == [room, room]
    assert ask(client, max_tokens=9, max_completion_tokens=2)["choices"][0]["finish_reason"] == "length"
    assert engine.requests[2].max_tokens == 2


def test_a_prompt_that_fills_the_context_is_refused_before_any_work(client: TestClient, engine: FakeEngine) -> None:
    error = refusal(client, messages=[{"role": "user", "content": "x" * 5000}])
    tokens = len(engine.pair.tokenizer.encode(PROMPT)) - 2 + 5000
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert error["message"] == (
        f"This model's maximum context length is 4096 tokens. However, you requested {tokens + 1} tokens "
        f"({tokens} in the messages, 1 in the completion). Please reduce the length of the messages or completion."
    )
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (tokens, 4096)
    assert engine.requests == []


def test_the_last_token_of_room_can_be_used(client: TestClient, engine: FakeEngine) -> None:
    ask(client)
    scaffold = len(engine.requests[0].prompt) - 2
    ask(client, messages=[{"role": "user", "content": "x" * (4096 - scaffold - 1)}])
    assert engine.requests[1].max_tokens == 1
    refusal(client, messages=[{"role": "user", "content": "x" * (4096 - scaffold)}])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -2),
        ("max_tokens", "10"),
        ("stop", ""),
        ("stop", ["a"] * 65),
        ("logprobs", 1),
        ("top_logprobs", 3),
        ("stream_options", 5),
        ("n", 33),
        ("best_of", 2),
        ("response_format", "json"),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("grammar", "root ::= x"),
        ("continue_final_message", "yes"),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "f"}]}}),
        ("messages", "hi"),
        ("messages", []),
        ("tools", {"a": 1}),
        ("chat_template_kwargs", {"tokenize": True}),
        ("reasoning_effort", 4),
    ],
)
def test_bad_values_are_refused_by_name(client: TestClient, engine: FakeEngine, field: str, value: Any) -> None:
    error = refusal(client, **{field: value})
    assert error["param"] == field
    assert field in error["message"]
    assert engine.requests == []


def test_top_logprobs_has_a_range(client: TestClient) -> None:
    assert refusal(client, logprobs=True, top_logprobs=21)["param"] == "top_logprobs"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tool_choice": "auto"},
        {"modalities": ["text"]},
        {"min_tokens": 0},
        {"no_such_field": {"deep": [1, 2]}},
        {"stream_options": {"include_usage": True, "else": 1}},
        {"parallel_tool_calls": False},
    ],
)
def test_harmless_values_are_accepted(client: TestClient, fields: dict[str, Any]) -> None:
    assert ask(client, **fields)["choices"][0]["message"]["content"] == "Hello"


def test_any_model_name_is_accepted_and_echoed(client: TestClient) -> None:
    assert ask(client, model="gpt-4o-mini")["model"] == "gpt-4o-mini"


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_strings_end_the_answer_and_the_work(client: TestClient, engine: FakeEngine, streamed: bool) -> None:
    engine.says("alpha beta gamma delta " * 50, end=False)
    fields = {"stop": ["eta gam", "zzz"], "max_tokens": 2000}
    if streamed:
        chunks = stream(client, **fields)
        shown, reason = text_of(chunks), chunks[-2]["choices"][0]["finish_reason"]
    else:
        choice = ask(client, **fields)["choices"][0]
        shown, reason = choice["message"]["content"], choice["finish_reason"]
    assert (shown, reason) == ("alpha b", "stop")
    assert engine.idle()
    assert len(engine.requests) == 1


def test_many_stop_strings_and_top_p_zero(client: TestClient, engine: FakeEngine) -> None:
    engine.says("Hello")
    body = ask(client, stop=[f"no {i}" for i in range(63)] + ["l"], top_p=0, temperature=1)
    assert body["choices"][0]["message"]["content"] == "He"
    assert (engine.requests[-1].sampling.top_p, engine.requests[-1].sampling.temperature) == (0, 1)


def test_a_stop_string_stops_the_engine(client: TestClient, engine: FakeEngine) -> None:
    late = threading.Event()
    timer = threading.Timer(60, late.set)
    timer.start()
    engine.script = lambda request: [*engine.tokens("aXb", end=False), late, *engine.tokens("c")]
    body = ask(client, stop="X", max_tokens=4000)
    timer.cancel()
    assert body["usage"]["completion_tokens"] == 2
    assert body["specprefill"]["mode"] == "full"
    assert engine.idle()
    assert engine.reasons == ["cancelled"]


def test_characters_are_never_split(client: TestClient, engine: FakeEngine) -> None:
    engine.says("naïve 你好 🎉")
    contents = [chunk["choices"][0]["delta"].get("content", "") for chunk in stream(client)[:-1]]
    assert "".join(contents) == "naïve 你好 🎉"
    assert not any("�" in content for content in contents)


def test_logprobs(client: TestClient, engine: FakeEngine) -> None:
    engine.says("hé")
    body = ask(client, logprobs=True, top_logprobs=2)
    ChatCompletion.model_validate(body, strict=True)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[byte] for byte in "hé".encode()]
    assert [entry["token"] for entry in content] == ["h", "�", "�"]
    assert content[0]["logprob"] == -0.25
    assert [other["token"] for other in content[0]["top_logprobs"]] == ["h", "i"]
    chunks = stream(client, logprobs=True, top_logprobs=2)
    scored = [choice["logprobs"] for chunk in chunks[:-1] for choice in chunk["choices"] if choice["logprobs"]]
    assert [entry for scores in scored for entry in scores["content"]] == content


def test_logprobs_end_where_the_text_ends(client: TestClient, engine: FakeEngine) -> None:
    engine.says("abXYcd")
    choice = ask(client, logprobs=True, stop=["XY"])["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "b"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


def test_ignore_eos(client: TestClient, engine: FakeEngine) -> None:
    body = ask(client, ignore_eos=True)
    assert engine.requests[0].stop_token_ids == frozenset()
    assert body["choices"][0]["message"]["content"] == "Hello<|im_end|>"
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_counting_a_prompt(client: TestClient, engine: FakeEngine, choice: str) -> None:
    tools = [{"type": "function", "function": {"name": "read"}}]
    fields = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": choice}
    counted = client.post(f"{URL}/input_tokens", json=fields).json()
    assert not engine.requests
    ask(client, **fields)
    assert counted == {"object": "response.input_tokens", "input_tokens": len(engine.requests[0].prompt)}


def test_tools_are_rendered_unless_they_must_not_be_called(engine: FakeEngine) -> None:
    template = "{% for t in tools or [] %}T:{{ t.function.name }} {% endfor %}{{ messages[0].content }}"
    engine.pair = FakePair(byte_tokenizer(template))
    client = client_of(engine)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    ask(client, tools=[tool])
    ask(client, tools=[tool], tool_choice="none")
    assert [engine.pair.tokenizer.decode(list(r.prompt)) for r in engine.requests] == ["T:look Hi", "Hi"]


def test_template_kwargs(engine: FakeEngine) -> None:
    engine.pair = FakePair(byte_tokenizer("{{ reasoning_effort }}|{{ enable_thinking }}|{{ style }}"))
    client = client_of(engine)
    ask(client, reasoning_effort="high", chat_template_kwargs={"style": "terse"})
    ask(client, reasoning_effort="none")
    ask(client, chat_template_kwargs={"enable_thinking": True})
    prompts = [engine.pair.tokenizer.decode(list(request.prompt)) for request in engine.requests]
    assert prompts == ["high|True|terse", "|False|", "|True|"]


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('Roles must alternate') }}", "{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{% if %}", None],
)
def test_template_failures_are_the_requests_fault(engine: FakeEngine, template: str | None) -> None:
    engine.pair = FakePair(byte_tokenizer(template))
    assert refusal(client_of(engine))["param"] == "messages"


def test_an_empty_rendering_is_refused(engine: FakeEngine) -> None:
    engine.pair = FakePair(byte_tokenizer("{{ '' }}"))
    assert refusal(client_of(engine))["param"] == "messages"


def test_an_engine_failure_is_a_500_that_is_not_retried(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda request: [*engine.tokens("par", end=False), RuntimeError("out of memory")]
    answer = client.post(URL, json={"messages": HI})
    assert answer.status_code == 500
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == "engine_error"
    assert "out of memory" in answer.json()["error"]["message"]
    engine.says("fine")
    assert ask(client)["choices"][0]["message"]["content"] == "fine"


def test_a_failure_inside_a_stream_ends_the_stream_properly(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda request: [*engine.tokens("parX", end=False), RuntimeError("out of memory")]
    chunks = stream(client, stop="XY")
    assert text_of(chunks) == "parX"
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert "out of memory" in chunks[-2]["specprefill"]["reason"]
    assert chunks[-2]["engine_error"]["code"] == "engine_error"
    assert not any("error" in chunk for chunk in chunks[:-1])


def test_a_failure_keeps_the_engines_report(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda request: [Failed(RuntimeError("out of memory"), report_of(request))]
    report = stream(client, specprefill=True)[-2]["specprefill"]
    assert report["mode"] == "sparse"
    assert report["reason"] == "asked for; failed: out of memory"


def test_late_refusals_of_the_engine_keep_their_status(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda request: [InvalidRequestError("no", field="logit_bias")]
    answer = client.post(URL, json={"messages": HI})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_full_queue_is_a_503_with_retry_after(client: TestClient, engine: FakeEngine, streamed: bool) -> None:
    engine.full = True
    answer = client.post(URL, json={"messages": HI, "stream": streamed})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert "x-should-retry" not in answer.headers
    assert answer.json()["error"]["code"] == "engine_unavailable"


def test_an_impossible_token_does_not_kill_the_stream(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda request: [*engine.tokens("a", end=False), -5, *engine.tokens("b")]
    chunks = stream(client)
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert engine.idle()


def test_progress_is_reported_on_request(client: TestClient, engine: FakeEngine) -> None:
    steps = [Progress("queued", 0, 21), *(Progress("prefill", done, 14, cached=7) for done in (0, 8, 14))]
    engine.script = lambda request: [*steps, *engine.tokens("Hello")]
    chunks = stream(client, return_progress=True)
    reports = [chunk for chunk in chunks[:-1] if "prompt_progress" in chunk]
    for chunk in reports:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["choices"] == []
        assert set(chunk["prompt_progress"]) == {"total", "cache", "processed", "time_ms", "stage"}
    seen = [(one["prompt_progress"]["processed"], one["prompt_progress"]["cache"]) for one in reports]
    assert seen == [(7, 7), (15, 7), (21, 7)]  # nothing is said before the cache's share is known
    assert {one["prompt_progress"]["total"] for one in reports} == {len(engine.requests[0].prompt)}
    assert not any("prompt_progress" in chunk for chunk in stream(client)[:-1])


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "text/plain", "application/json"])
def test_the_content_type_does_not_matter(client: TestClient, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    answer = client.post(URL, content=b'{"messages":[{"role":"user","content":"Hi"}]}', headers=headers)
    assert answer.status_code == 200


def test_token_ids(client: TestClient, engine: FakeEngine) -> None:
    hello = engine.pair.tokenizer.encode("Hello")
    body = ask(client, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == hello
    assert body["prompt_token_ids"] == list(engine.requests[0].prompt)
    chunks = stream(client, return_token_ids=True)[:-1]
    assert [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]] == hello
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [body["prompt_token_ids"]]
    assert "token_ids" not in ask(client)["choices"][0]


THINKING = ("<think>\nTwo and two", " are four.\n</think>\n\nFour.", " are four.", "Four.")
ANSWERING = ("<think>Hm.</think>It", " is four.", None, " is four.")


@pytest.mark.parametrize(("begun", "written", "thought", "said"), [THINKING, ANSWERING])
def test_a_message_goes_on_inside_its_reasoning(
    client: TestClient, engine: FakeEngine, begun: str, written: str, thought: str | None, said: str
) -> None:
    """Where it broke off decides, not where the tag stands; and a user may write about tags."""
    engine.says(written)
    messages = [{"role": "user", "content": "What does <think> mean?"}, {"role": "assistant", "content": begun}]
    message = ask(client, messages=messages, continue_final_message=True)["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thought, said)
    blocks = client.post("/v1/messages", json={"messages": messages, "max_tokens": 99}).json()["content"]
    assert [block.get("thinking", block.get("text")) for block in blocks] == [text for text in (thought, said) if text]
    engine.says("Hello </think>.")
    assert ask(client, messages=messages[:1])["choices"][0]["message"]["content"] == "Hello </think>."


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("fields", [{}, {"logprobs": True}])
def test_an_event_is_one_line_for_every_client(
    client: TestClient, engine: FakeEngine, path: str, fields: dict[str, Any]
) -> None:
    """Clients on httpx also end lines at these three characters."""
    engine.says("a\u2028b\u2029c\x85dé")
    asked = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    asked = {"input": "Hi"} if path == "/v1/responses" else asked
    fields = {"logprobs": 1} if fields and path == "/v1/completions" else fields
    with client.stream("POST", path, json={**asked, "max_tokens": 99, "stream": True, **fields}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    shown = json.dumps([json.loads(line) for line in lines], ensure_ascii=False)
    assert all(char in shown for char in "\u2028\u2029\x85é")
