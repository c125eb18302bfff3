from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import Completion
from starlette.testclient import TestClient

from mlx_specprefill import Finished, PrefillReport, Timings

from .conftest import client_of, events
from .fakes import FakeEngine, FakePair

URL = "/v1/completions"


def ask(client: TestClient, prompt: Any = "ab", **fields: Any) -> Any:
    answer = client.post(URL, json={"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "text_completion"
    return body


def stream(client: TestClient, prompt: Any = "ab", **fields: Any) -> list[Any]:
    answer = client.post(URL, json={"prompt": prompt, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    chunks = events(answer.text)
    assert chunks[-1] == "[DONE]"
    assert all(chunk["object"] == "text_completion" for chunk in chunks[:-1])
    return chunks


def refusal(client: TestClient, prompt: Any = "ab", **fields: Any) -> Any:
    answer = client.post(URL, json={"prompt": prompt, **fields})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def texts(body: Any) -> list[str]:
    return [choice["text"] for choice in body["choices"]]


def test_a_raw_prompt_has_no_template_and_no_spans(client: TestClient, engine: FakeEngine) -> None:
    body = ask(client)
    Completion.model_validate(body, strict=False)
    assert texts(body) == ["Hello"]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["logprobs"] is None
    assert list(engine.requests[0].prompt) == engine.pair.tokenizer.encode("ab")
    assert engine.requests[0].spans == ()
    assert body["usage"]["prompt_tokens"] == 2
    assert body["specprefill"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [[64]]),
        (["a", "bc"], [[64], [65, 66]]),
        ([64, 65], [[64, 65]]),
        ([[64], [65, 66]], [[64], [65, 66]]),
        (["a", [65]], [[64], [65]]),
    ],
)
def test_forms_of_prompt(client: TestClient, engine: FakeEngine, prompt: Any, expected: list[list[int]]) -> None:
    assert engine.pair.tokenizer.encode("abc") == [64, 65, 66]
    engine.script = lambda request: engine.tokens(f"<{len(request.prompt)}>")
    body = ask(client, prompt)
    assert [list(request.prompt) for request in engine.requests] == expected
    assert texts(body) == [f"<{len(ids)}>" for ids in expected]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [[]],
        [""],
        None,
        5,
        [1.5],
        [True],
        [-1],
        [[99999]],
        ["a"] * 129,
    ],
)
def test_bad_prompts_are_refused_by_name(client: TestClient, engine: FakeEngine, prompt: Any) -> None:
    error = refusal(client, prompt)
    assert error["param"] == "prompt"
    assert engine.requests == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 21),
        ("logprobs", True),
        ("suffix", "end"),
        ("best_of", 3),
        ("n", "2"),
        ("echo", "yes"),
    ],
)
def test_bad_values_are_refused_by_name(client: TestClient, engine: FakeEngine, field: str, value: Any) -> None:
    assert refusal(client, **{field: value})["param"] == field
    assert engine.requests == []


def test_echo(client: TestClient, engine: FakeEngine) -> None:
    assert texts(ask(client, ["ab", [66]], echo=True)) == ["abHello", "cHello"]
    assert all(request.prompt_logprobs is None for request in engine.requests)
    chunks = stream(client, echo=True)
    assert "".join(choice["text"] for chunk in chunks[:-1] for choice in chunk["choices"]) == "abHello"


def test_echo_without_an_answer(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda request: []
    body = ask(client, echo=True, max_tokens=0)
    assert texts(body) == ["ab"]
    assert body["choices"][0]["logprobs"] is None
    assert engine.requests[0].max_tokens == 0
    full = ask(client, "x" * 4096, echo=True, max_tokens=0)
    assert full["usage"]["total_tokens"] == 4096


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_with_logprobs_scores_the_prompt(client: TestClient, engine: FakeEngine, streamed: bool) -> None:
    engine.says("c")
    fields = {"echo": True, "logprobs": 1}
    if streamed:
        choices = [choice for chunk in stream(client, "ab", **fields)[:-1] for choice in chunk["choices"]]
        scores: dict[str, list[Any]] = {}
        for choice in choices:
            for name, values in (choice["logprobs"] or {}).items():
                scores.setdefault(name, []).extend(values)
        text = "".join(choice["text"] for choice in choices)
    else:
        choice = ask(client, "ab", **fields)["choices"][0]
        text, scores = choice["text"], choice["logprobs"]
    assert text == "abc"
    assert engine.requests[0].prompt_logprobs == 1
    assert scores["tokens"] == ["a", "b", "c"]
    assert scores["token_logprobs"] == [None, -0.5, -0.25]
    assert scores["text_offset"] == [0, 1, 2]
    assert scores["top_logprobs"][0] is None
    assert scores["top_logprobs"][1]["b"] == -0.25  # the likelier of two entries with one text
    assert scores["top_logprobs"][2] == {"c": -0.25}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_count_the_characters_that_are_sent(
    client: TestClient, engine: FakeEngine, streamed: bool, echo: bool
) -> None:
    """Each byte is a token, so those of one character begin where it does."""
    engine.says("né\U0001f389 x")
    if streamed:
        parts = [c for chunk in stream(client, "aé", echo=echo, logprobs=1)[:-1] for c in chunk["choices"]]
        text, offsets = "", list[int]()
        for part in parts:
            text += part["text"]
            offsets += (part["logprobs"] or {"text_offset": []})["text_offset"]
    else:
        choice = ask(client, "aé", echo=echo, logprobs=1)["choices"][0]
        text, offsets = choice["text"], choice["logprobs"]["text_offset"]
    assert text == ("aé" if echo else "") + "né\U0001f389 x"
    assert offsets == [place for place, char in enumerate(text) for _ in char.encode()]


def test_a_one_token_prompt_has_no_scores(client: TestClient) -> None:
    scores = ask(client, "a", echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert scores["tokens"][0] == "a"
    assert scores["token_logprobs"][:2] == [None, -0.25]


def test_logprobs_without_tokens_are_empty_lists(client: TestClient, engine: FakeEngine) -> None:
    engine.says("")
    scores = ask(client, logprobs=2)["choices"][0]["logprobs"]
    assert scores == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def test_several_prompts_share_one_stream(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda request: engine.tokens(f"<{len(request.prompt)}>")
    chunks = stream(client, ["a", "bc"], stream_options={"include_usage": True})
    shown = ["", ""]
    finished = []
    for chunk in chunks[:-2]:
        (choice,) = chunk["choices"]
        shown[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            finished.append(choice["index"])
    assert shown == ["<1>", "<2>"]
    assert sorted(finished) == [0, 1]
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["prompt_tokens"] == 3
    assert chunks[-2]["specprefill"]["prompt_tokens"] == 3


def test_the_report_of_several_prompts_is_their_sum(client: TestClient, engine: FakeEngine) -> None:
    modes = iter(["sparse", "full"])

    def script(request: Any) -> list[Any]:
        sparse = next(modes) == "sparse"
        n = len(request.prompt)
        times = Timings(prefill_ms=5)
        mode, kept = ("sparse", n - 1) if sparse else ("full", n)
        report = PrefillReport(mode, f"r{n}", prompt_tokens=n, kept_tokens=kept, kept_share=0.5, timings=times)
        return [Finished("stop", 0, report)]

    engine.script = script
    report = ask(client, ["abcd", "ab"])["specprefill"]
    assert report["mode"] == "sparse"
    assert report["reason"] == "r4; r2"
    assert (report["prompt_tokens"], report["kept_tokens"]) == (6, 5)
    assert report["kept_share"] == pytest.approx(5 / 6)
    assert report["timings"]["prefill_ms"] == 10


def test_one_failure_among_several_prompts(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda request: [RuntimeError("bad")] if len(request.prompt) == 1 else engine.tokens("ok")
    assert client.post(URL, json={"prompt": ["a", "bc"]}).status_code == 500
    chunks = stream(client, ["a", "bc"])
    reasons = {c["choices"][0]["index"]: c["choices"][0]["finish_reason"] for c in chunks[:-1]}
    assert reasons == {0: "length", 1: "stop"}
    assert chunks[-2]["engine_error"]["code"] == "engine_error"
    assert engine.idle()


def test_all_prompts_are_taken_or_none(client: TestClient, engine: FakeEngine) -> None:
    submit, late = engine.submit, threading.Event()
    timer = threading.Timer(60, late.set)
    timer.start()
    engine.script = lambda request: [late, *engine.tokens("late")]

    def full_after_one(*args: Any) -> Any:
        handle = submit(*args)
        engine.full = True
        return handle

    engine.submit = full_after_one
    engine_full = client.post(URL, json={"prompt": ["a", "b"]})
    assert engine_full.status_code == 503
    assert engine.idle()
    timer.cancel()
    assert engine.reasons == ["cancelled"]


def test_a_leading_space_of_the_answer_survives(client: TestClient, engine: FakeEngine) -> None:
    engine.says(" Paris")
    assert texts(ask(client, "The capital is")) == [" Paris"]


def test_n_answers_to_each_prompt(client: TestClient, engine: FakeEngine) -> None:
    """In the order of prompts, each with a seed of its own; usage counts each prompt once."""
    engine.script = lambda request: engine.tokens(f"{len(request.prompt)}/{request.sampling.seed}")
    body = ask(client, ["ab", "c"], n=3, best_of=3, seed=7, temperature=1)
    assert texts(body) == ["2/7", "2/8", "2/9", "1/7", "1/8", "1/9"]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"]["prompt_tokens"] == 3
    shown = [""] * 6
    for chunk in stream(client, ["ab", "c"], n=3, seed=7, temperature=1)[:-1]:
        for choice in chunk["choices"]:
            shown[choice["index"]] += choice["text"]
    assert shown == texts(body)


def test_an_answer_that_fails_does_not_keep_the_others_from_starting(client: TestClient, engine: FakeEngine) -> None:
    scripts: Iterator[Any] = iter([[RuntimeError("bad")], engine.tokens("ok"), engine.tokens("ok")])
    engine.script = lambda request: next(scripts)
    assert reasons(stream(client, "ab", n=3)) == {0: "length", 1: "stop", 2: "stop"}


def reasons(chunks: list[Any]) -> dict[int, str]:
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    return {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}


def test_answers_are_limited_over_all_prompts(client: TestClient, engine: FakeEngine) -> None:
    assert refusal(client, ["a"] * 100, n=2)["param"] == "n"
    assert engine.requests == []


def test_token_ids(client: TestClient, engine: FakeEngine) -> None:
    (choice,) = ask(client, "ab", return_token_ids=True)["choices"]
    hello = engine.pair.tokenizer.encode("Hello")
    assert (choice["token_ids"], choice["prompt_token_ids"], choice["logprobs"]) == (hello, [64, 65], None)
    choices = [c for chunk in stream(client, "ab", return_token_ids=True)[:-1] for c in chunk["choices"]]
    assert [token for c in choices for token in c["token_ids"]] == hello
    assert [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c] == [[64, 65]]
    assert "token_ids" not in ask(client, "ab")["choices"][0]


def test_constraints_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    ask(client, "ab", structured_outputs={"choice": ["yes", "no"]}, ignore_eos=True, min_tokens=3, max_tokens=9)
    (request,) = engine.requests
    assert request.constraint.field == "structured_outputs.choice"
    assert request.stop_token_ids  # the grammar says where the answer ends
    assert request.min_tokens == 3
    ask(client, "ab", response_format={"type": "text"}, ignore_eos=True)
    assert engine.requests[1].constraint is None
    assert not engine.requests[1].stop_token_ids


def test_min_tokens_fits_into_what_is_left(client: TestClient, engine: FakeEngine) -> None:
    ask(client, "x" * 4090, min_tokens=50)
    assert (engine.requests[0].max_tokens, engine.requests[0].min_tokens) == (6, 6)


@pytest.mark.parametrize(
    ("markers", "rendered"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>"),
        (("[SUFFIX]", "[PREFIX]"), "[SUFFIX]cd[PREFIX]ab"),
    ],
)
def test_filling_in_the_middle(markers: tuple[str, ...], rendered: str) -> None:
    pair = FakePair()
    pair.tokenizer._tokenizer.add_special_tokens({"additional_special_tokens": list(markers)})
    engine = FakeEngine(pair)
    client = client_of(engine)
    body = ask(client, "ab", suffix="cd", echo=True)
    assert texts(body) == ["abHello"]
    assert engine.pair.tokenizer.decode(engine.requests[0].prompt) == rendered
    assert refusal(client, [64, 65], suffix="cd")["param"] == "suffix"
    engine.close()
