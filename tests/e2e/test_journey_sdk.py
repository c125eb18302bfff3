"""The bundled pair behind the real process, driven as a user would: by OpenAI's SDK."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import httpx
import openai
import orjson
import pytest

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
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_seed_fixes_the_answer(client: openai.OpenAI) -> None:
    answers = [
        client.chat.completions.create(model="any", messages=HI, max_tokens=20, temperature=1.5, seed=seed)
        for seed in (1, 1, 2, 3, 4)
    ]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


LONG = {"max_tokens": 16_000, "ignore_eos": True}  # most of a minute


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


def test_decisions_are_those_of_completions(client: openai.OpenAI, server: Server) -> None:
    """Behind the same tokens, whose logprobs an echo gives; a second call reads its questions alone."""
    text = haystack("Anna", "471128", 500, 0.5, seed=4711)
    whole: Any = {"extra_body": {"specprefill": False}}
    levels: Any = {
        "type": "score",
        "instructions": "How long is it?",
        "levels": [{"label": "short"}, {"label": "long"}],
    }
    asked: Any = [
        {"type": "predicate", "instructions": f"The code for {name} is 471128."} for name in ("Anna", "Peter")
    ]
    first = client.decisions.create(model="any", input=text, questions=asked[:1], **whole)
    found = client.decisions.create(model="any", input=text, questions=[*asked, levels], **whole)
    prompt_tokens = report_of(found)["prompt_tokens"]
    assert first.usage.input_tokens_details.cached_tokens < 16  # the header of a message, which others have, too
    assert found.usage.input_tokens_details.cached_tokens == prompt_tokens - 1
    for question, answer in zip(asked, found.answers, strict=False):
        messages = [*user(text), *user(f"{question['instructions']} Yes or No?")]
        ids = httpx.post(f"{server.base}/tokenize", json={"messages": messages}).json()["tokens"]
        logprobs = []
        for label in ("Yes", "No"):
            label_ids = httpx.post(f"{server.base}/tokenize", json={"content": label}).json()["tokens"]
            echoed = client.completions.create(
                model="any", prompt=[*ids, *label_ids], max_tokens=0, echo=True, logprobs=0
            )
            shown = echoed.choices[0].logprobs.token_logprobs
            logprobs.append(shown[len(ids)])
        odds = [math.exp(one - max(logprobs)) for one in logprobs]
        assert answer.probability == pytest.approx(odds[0] / sum(odds), abs=1e-5)


def test_the_questions_choose_what_is_read(client: openai.OpenAI, server: Server) -> None:
    """The passages of both names are read, although the prompt asks for none."""
    text = f"{haystack('Anna', '471128', 1500, 0.4, seed=815)}\n{haystack('Peter', '903377', 1500, 0.7, seed=816)}"
    asked: Any = [
        {"type": "predicate", "instructions": f"The secret code for {n} is short."} for n in ("Anna", "Peter")
    ]
    options = {"specprefill": True, "specprefill_return_spans": True}
    found = client.decisions.create(model="any", input=text, questions=asked, extra_body=options)
    assert report_of(found)["mode"] == "sparse"
    assert [answer.model_extra["specprefill"] for answer in found.answers] == [{"kept": True}] * 2
    ids = httpx.post(f"{server.base}/tokenize", json={"messages": user(text)}).json()["tokens"]
    kept = [token for start, end in report_of(found)["kept_spans"] for token in ids[start:end]]
    read = httpx.post(f"{server.base}/detokenize", json={"tokens": kept}).json()["content"]
    assert "471128" in read
    assert "903377" in read
