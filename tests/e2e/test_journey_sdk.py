"""The bundled pair behind the real process, driven as a user would: by OpenAI's SDK."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import openai
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.body_strategies import CHAT, COMPLETION
from tests.support.examples import examples
from tests.support.serving import Server

from .conftest import haystack

NEEDLES = [
    ("Anna", "471128", 700, 0.2),
    ("Peter", "903377", 900, 0.5),
    ("Maria", "256094", 1100, 0.8),
    ("Alice", "118853", 800, 0.6),
]
HI: Any = [{"role": "user", "content": "Hello"}]


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def needle(index: int, salt: int = 0) -> tuple[str, Any]:
    """A prompt that no other salt shares: what is cached of an earlier one would not be prefilled again."""
    name, code, words, depth = NEEDLES[index]
    return code, user(haystack(name, code, words, depth, seed=index + 100 * salt))


def report_of(answer: Any) -> dict[str, Any]:
    extra: dict[str, Any] = answer.model_extra["specprefill"]
    assert set(extra) >= {"mode", "reason", "prompt_tokens", "kept_tokens", "cached_tokens", "keep_pct", "timings"}
    assert set(extra["timings"]) >= {"draft_ms", "select_ms", "prefill_ms", "ttft_ms"}
    return extra


def test_a_short_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="any", messages=HI, max_tokens=30)
    assert answer.choices[0].message.content
    assert report_of(answer)["mode"] == "full"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == report_of(answer)["prompt_tokens"] == report_of(answer)["kept_tokens"]


@pytest.mark.parametrize("options", [{"specprefill": False}, {"specprefill": True}])
def test_a_message_goes_on(client: openai.OpenAI, options: dict[str, Any]) -> None:
    """The answer is what is still missing, and nothing of what was there."""
    code, messages = needle(0, salt=90 + options["specprefill"])  # else the second prompt would be cached in full
    begun: Any = {"role": "assistant", "content": "The secret code for Anna is"}
    extra = {**options, "continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(model="any", messages=[*messages, begun], max_tokens=30, extra_body=extra)
    assert answer.choices[0].message.content == f" {code}."
    assert report_of(answer)["mode"] == ("sparse" if options["specprefill"] else "full")


def test_a_drafted_answer_is_the_plain_one(client: openai.OpenAI) -> None:
    """Streamed or not, up to a stop string in the middle of a round, and where a model can't be drafted for."""
    code, messages = needle(0, salt=10)
    asked: dict[str, Any] = {"model": "any", "messages": messages, "max_tokens": 30, "stop": [code[3:]]}
    plain = client.chat.completions.create(**asked)
    assert plain.choices[0].finish_reason == "stop"
    assert (plain.choices[0].message.content or "").endswith(code[:3])
    assert "speculation" not in report_of(plain)
    for how, ran in (("draft", "draft"), ("triforce", "triforce"), ("mtp", "autoregressive")):
        answer = client.chat.completions.create(**asked, extra_body={"speculative": how, "specprefill": True})
        assert answer.choices[0].message.content == plain.choices[0].message.content
        assert report_of(answer)["speculation"]["strategy"] == ran
    assert "MTP" in report_of(answer)["speculation"]["reason"]
    chunks = client.chat.completions.create(**asked, stream=True, extra_body={"speculative": "draft"})
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == plain.choices[0].message.content


@pytest.mark.parametrize(
    ("salt", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.extended),
        (2, {"specprefill": True}),
        pytest.param(3, {"specprefill": None, "specprefill_keep_pct": 0.3}, marks=pytest.mark.extended),
    ],
)
def test_the_needle_survives_sparse_prefill(client: openai.OpenAI, salt: int, options: dict[str, Any]) -> None:
    found = 0
    for index in range(len(NEEDLES)):
        code, messages = needle(index, salt)
        extra = {**options, "specprefill_return_spans": True}
        answer = client.chat.completions.create(model="any", messages=messages, max_tokens=30, extra_body=extra)
        report = report_of(answer)
        assert report["mode"] == "sparse", report["reason"]
        assert 0 < report["kept_tokens"] < 0.6 * report["prompt_tokens"]
        assert report["kept_share"] == pytest.approx(report["kept_tokens"] / report["prompt_tokens"], abs=1e-5)
        assert sum(end - start for start, end in report["kept_spans"]) == report["kept_tokens"]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == report["prompt_tokens"]
        assert report["timings"]["draft_ms"] > 0
        assert report["timings"]["ttft_ms"] >= report["timings"]["prefill_ms"] > 0
        found += code in (answer.choices[0].message.content or "")
    assert found >= len(NEEDLES) - 1


@pytest.mark.extended
def test_a_needle_in_the_system_message_is_found(client: openai.OpenAI) -> None:
    """At 20 % in scope all; without that, all of the system message is read."""
    found = 0
    for index, (name, code, words, depth) in enumerate(NEEDLES):
        text = haystack(name, code, words, depth, seed=index + 40)
        document, question = text.rsplit("\n\n", 1)
        system = f"Answer from what you are given.\n\n{document}\n\nBe brief."
        messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        answer = client.chat.completions.create(
            model="any", messages=messages, max_tokens=30, extra_body={"specprefill": True, "specprefill_scope": "all"}
        )
        report = report_of(answer)
        assert (report["mode"], report["scope"]) == ("sparse", "all"), report["reason"]
        assert report["kept_tokens"] < 0.7 * report["prompt_tokens"]
        found += code in (answer.choices[0].message.content or "")
    assert found >= len(NEEDLES) - 1
    narrow = {"specprefill": True}
    answer = client.chat.completions.create(model="any", messages=messages, max_tokens=1, extra_body=narrow)
    assert report_of(answer)["mode"] == "full"


@pytest.mark.extended
def test_what_an_agent_looked_for_is_found_in_any_tool_result(client: openai.OpenAI) -> None:
    """The question stands before the results: the last line of a file asks nothing."""
    found = 0
    for place, (name, code, words, _) in enumerate(NEEDLES[:3]):
        messages: Any = user(f"What is the secret code for {name}?")
        for index in range(3):
            inside = name if index == place else f"nobody {index}"
            text = haystack(inside, code if index == place else "000000", words // 2, 0.5, seed=60 + 3 * place + index)
            call = {"name": "read_file", "arguments": f'{{"path": "notes/{index}.txt"}}'}
            calls = [{"id": f"c{index}", "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": f"c{index}", "content": text.rsplit("\n\n", 1)[0]})
        answer = client.chat.completions.create(
            model="any", messages=messages, max_tokens=30, extra_body={"specprefill_scope": "user"}
        )
        assert report_of(answer)["mode"] == "sparse", report_of(answer)["reason"]
        found += code in (answer.choices[0].message.content or "")
    assert found >= 2


def test_full_prefill_answers_too(client: openai.OpenAI) -> None:
    code, messages = needle(0)
    answer = client.chat.completions.create(
        model="any", messages=messages, max_tokens=30, extra_body={"specprefill": False}
    )
    assert report_of(answer)["mode"] == "full"
    assert report_of(answer)["keep_pct"] is None
    assert report_of(answer)["kept_tokens"] == report_of(answer)["prompt_tokens"]
    assert code in (answer.choices[0].message.content or "")


def test_force_ignores_the_threshold(client: openai.OpenAI) -> None:
    text = haystack("Anna", "471128", 250, 0.3, seed=9)
    by_policy = client.chat.completions.create(model="any", messages=user(text), max_tokens=1)
    assert report_of(by_policy)["mode"] == "full"
    assert "threshold 512" in report_of(by_policy)["reason"]
    forced = client.chat.completions.create(
        model="any", messages=user(text), max_tokens=1, extra_body={"specprefill": True, "specprefill_keep_pct": 0.1}
    )
    assert report_of(forced)["mode"] == "sparse", report_of(forced)["reason"]
    assert report_of(forced)["kept_tokens"] < report_of(forced)["prompt_tokens"]


@pytest.mark.extended
def test_keeping_more_keeps_more(client: openai.OpenAI) -> None:
    kept = []
    for salt, share in ((5, 0.1), (6, 0.4), (7, 1)):
        _, messages = needle(2, salt)
        answer = client.chat.completions.create(
            model="any",
            messages=messages,
            max_tokens=1,
            extra_body={"specprefill": True, "specprefill_keep_pct": share},
        )
        kept.append(report_of(answer)["kept_tokens"] / report_of(answer)["prompt_tokens"])
    assert kept[0] < kept[1] < kept[2] == 1


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream(client: openai.OpenAI, include_usage: bool) -> None:
    code, messages = needle(1, salt=8 + include_usage)
    chunks = list(
        client.chat.completions.create(
            model="any",
            messages=messages,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": include_usage},
            extra_body={"specprefill": True},
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    whole = client.chat.completions.create(
        model="any", messages=messages, max_tokens=30, extra_body={"specprefill": True}
    )
    assert text == whole.choices[0].message.content
    assert code in text
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert report_of(chunks[-1])["mode"] == "sparse"
    assert (chunks[-1].usage is not None) == include_usage
    if include_usage:
        assert whole.usage is not None
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


@pytest.mark.parametrize("share", [0, -0.1, 1.5, "0.2", True])
def test_bad_keep_pct(client: openai.OpenAI, share: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="any", messages=HI, extra_body={"specprefill_keep_pct": share})
    assert caught.value.param == "specprefill_keep_pct"
    assert caught.value.type == "invalid_request_error"


def test_a_seed_fixes_the_answer(client: openai.OpenAI) -> None:
    answers = [
        client.chat.completions.create(model="any", messages=HI, max_tokens=20, temperature=1.5, seed=seed)
        for seed in (1, 1, 2, 3, 4)
    ]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_stop_strings(client: openai.OpenAI) -> None:
    code, messages = needle(0)
    answer = client.chat.completions.create(
        model="any", messages=messages, max_tokens=30, stop=[code[2:4]], extra_body={"specprefill": False}
    )
    text = answer.choices[0].message.content or ""
    assert text.endswith(code[:2])
    assert answer.choices[0].finish_reason == "stop"


def test_completions_with_echo_and_logprobs(client: openai.OpenAI) -> None:
    prompt = "The secret code for Anna is 471128. The secret code for Anna is"
    answer = client.completions.create(
        model="any", prompt=prompt, max_tokens=2, echo=True, logprobs=2, extra_body={"specprefill": True}
    )
    assert report_of(answer)["mode"] == "full"
    choice = answer.choices[0]
    assert choice.text.startswith(prompt)
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.token_logprobs is not None
    assert "".join(scores.tokens) == choice.text
    assert scores.token_logprobs[0] is None
    assert all(value <= 0 for value in scores.token_logprobs[1:])
    assert len(scores.tokens) == report_of(answer)["prompt_tokens"] + 2
    only = client.completions.create(model="any", prompt=prompt, max_tokens=0, echo=True, logprobs=2)
    assert only.choices[0].text == prompt
    assert only.choices[0].logprobs is not None
    assert only.choices[0].logprobs.token_logprobs == scores.token_logprobs[:-2]


def test_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["The secret code for Anna is 4711", "Hello"]
    answer = client.completions.create(model="any", prompt=prompts, max_tokens=3)
    single = [client.completions.create(model="any", prompt=prompt, max_tokens=3) for prompt in prompts]
    assert [choice.text for choice in answer.choices] == [one.choices[0].text for one in single]


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="any", messages=HI, max_tokens=5, logprobs=True, top_logprobs=3)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    for entry in scores.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)  # greedy takes the likeliest
    assert b"".join(bytes(entry.bytes or []) for entry in scores.content).decode() == answer.choices[0].message.content


def test_a_prompt_longer_than_the_window(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="any", messages=user("word " * 20_000))
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 16384 tokens" in str(caught.value)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert client.models.retrieve(model.id).id == model.id
    assert model.model_extra is not None
    assert model.model_extra["specprefill"] == {"available": True, "reason": None}
    assert model.model_extra["context_length"] == 16384


LONG = {"max_tokens": 16_000, "ignore_eos": True}  # most of a minute


def test_leaving_a_stream_stops_the_work(server: Server) -> None:
    body = {"messages": HI, "stream": True, **LONG}
    with httpx.stream("POST", f"{server.base}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
        assert server.health()["running"] == 1
    assert server.wait_until(running=0) < 30


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_leaving_a_whole_answer_stops_the_work(server: Server, path: str) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient(timeout=60) as impatient:
            body = {"messages": HI, "prompt": "Hello", **LONG}
            post = asyncio.create_task(impatient.post(f"{server.base}/v1/{path}", json=body))
            await asyncio.to_thread(server.wait_until, running=1)
            assert not post.done()
            post.cancel()

    asyncio.run(leave())
    assert server.wait_until(running=0) < 30


def test_leaving_during_prefill_stops_the_work(server: Server) -> None:
    text = haystack("Anna", "471128", 8000, 0.5, seed=3)  # some 48 steps of the engine
    body = {"messages": user(text), "stream": True, "return_progress": True, "specprefill": False}
    with httpx.stream("POST", f"{server.base}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()  # held: a dropped iterator closes the connection
        for line in lines:
            if '"stage":"prefill"' in line:
                break
            assert '"finish_reason":"' not in line
        assert server.health()["running"] == 1
    assert server.wait_until(running=0) < 30


def test_several_clients_at_once(client: openai.OpenAI) -> None:
    answers: list[Any] = [None] * len(NEEDLES)

    def ask(index: int) -> None:
        _, messages = needle(index, salt=4)
        answers[index] = client.chat.completions.create(model="any", messages=messages, max_tokens=30)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(NEEDLES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [report_of(answer)["mode"] for answer in answers] == ["sparse"] * len(answers)
    assert sum(NEEDLES[i][1] in (answer.choices[0].message.content or "") for i, answer in enumerate(answers)) >= 3


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1}', 200),
        ('{"messages":[{"role":"user","content":"\\ud800"}],"max_tokens":1}', 200),
        ('{"messages":[{"role":"user","content":"Hi"}],"top_k":1000000000,"max_tokens":1}', 200),
        ('{"messages":[{"role":"user","content":"Hi"}],"seed":99999999999999999999999}', 400),
        ('{"messages":[{"role":"user","content":"Hi"}],"temperature":NaN}', 400),
        ('{"messages":[{"role":"user","content":"Hi"}],"stop":[1]}', 400),
        ('{"messages":[{"role":"user","content":""}],"max_tokens":1}', 200),
        ('{"messages":[]}', 400),
        ("garbage", 400),
        ("", 400),
    ],
)
def test_curl_style_posts(server: Server, body: str, status: int) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{server.base}/v1/chat/completions", content=body, headers=form, timeout=60)
    assert answer.status_code == status
    assert server.health()["status"] == "ok"


@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
@given(body=CHAT | COMPLETION, limit=st.integers(1, 3))
@pytest.mark.extended
@pytest.mark.nightly
def test_garbage_never_hurts(server: Server, body: dict[str, Any], limit: int) -> None:
    body = body | {"max_tokens": limit, "max_completion_tokens": None}
    path = "completions" if "prompt" in body else "chat/completions"
    answer = httpx.post(f"{server.base}/v1/{path}", content=orjson.dumps(body), timeout=60)
    assert answer.status_code in (200, 400), answer.text
    assert "engine_error" not in answer.text
    state = server.health()
    assert (state["running"], state["queued"]) == (0, 0)


def test_a_forced_call_comes_whole_and_ends(client: openai.OpenAI) -> None:
    """Grammar and reader force a call from a model that knows no tools."""
    colours = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
    tools: Any = [{"type": "function", "function": {"name": "paint", "parameters": colours}}]
    answer = client.chat.completions.create(model="any", messages=HI, tools=tools, tool_choice="required")
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls = [orjson.loads(call.function.arguments) for call in choice.message.tool_calls or []]
    assert calls in (
        [{"colour": one} for one in order] for order in (["red"], ["green"], ["red", "green"], ["green", "red"])
    )
    cut = client.chat.completions.create(model="any", messages=HI, tools=tools, tool_choice="required", max_tokens=5)
    assert (cut.choices[0].finish_reason, cut.choices[0].message.content or "") == ("length", "")
