"""Fields that change how tokens are drawn or where answers end: honoured or refused in every dialect, never ignored."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specprefill import GenerationRequest

from .conftest import client_of, events
from .fakes import CHATML, FakeEngine, FakePair, byte_tokenizer, comparable

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 50},
}
EVERYWHERE = pytest.mark.parametrize("path", BODIES)


def post(client: TestClient, path: str, **fields: Any) -> Any:
    return client.post(path, json={**BODIES[path], **fields})


def asked(client: TestClient, engine: FakeEngine, path: str, **fields: Any) -> GenerationRequest:
    answer = post(client, path, **fields)
    assert answer.status_code == 200, answer.text
    return engine.requests[-1]


def text_of(answer: Any) -> str:
    match answer:
        case {"choices": [{"message": message}]}:
            text = message["content"]
        case {"choices": [{"text": text}]} | {"content": [{"text": text}]}:
            pass
        case {"output": [{"content": [{"text": text}]}]}:
            pass
    return str(text)


def refusal(client: TestClient, path: str, **fields: Any) -> str:
    answer = post(client, path, **fields)
    assert answer.status_code == 400, (fields, answer.text)
    message: str = answer.json()["error"]["message"]
    return message


@EVERYWHERE
def test_what_the_engine_does_reaches_it(client: TestClient, engine: FakeEngine, path: str) -> None:
    fields = {
        "temperature": 0.9, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "repeat_penalty": 1.3, "presence_penalty": 1,
        "frequency_penalty": 0.5, "seed": 3, "logit_bias": {"5": 2}, "min_tokens": 2, "stop_token_ids": [70],
    }  # fmt: skip
    request = asked(client, engine, path, **fields)
    sampling, end = request.sampling, engine.pair.tokenizer.eos_token_id
    for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed"):
        assert getattr(sampling, name) == fields[name], name
    assert sampling.repetition_penalty == 1.3
    assert sampling.logit_bias == {5: 2.0}
    assert (request.min_tokens, request.stop_token_ids) == (2, {70, end})
    assert asked(client, engine, path, stop_token_ids=[70], ignore_eos=True).stop_token_ids == {70}


@EVERYWHERE
def test_a_stop_token_ends_the_answer_and_is_shown_only_on_request(
    client: TestClient, engine: FakeEngine, path: str
) -> None:
    engine.says("Hello there")
    (stop,) = engine.pair.tokenizer.encode("o")
    assert text_of(post(client, path, stop_token_ids=[stop]).json()) == "Hell"
    shown = {"stop_token_ids": [stop], "include_stop_str_in_output": True}
    assert text_of(post(client, path, **shown).json()) == "Hello"


@EVERYWHERE
def test_a_stop_string_may_be_shown(client: TestClient, engine: FakeEngine, path: str) -> None:
    engine.says("Hello there")
    name = "stop_sequences" if path == "/v1/messages" else "stop"
    assert text_of(post(client, path, **{name: ["lo t"]}).json()) == "Hel"
    answer = post(client, path, **{name: ["lo t"]}, include_stop_str_in_output=True)
    assert text_of(answer.json()) == "Hello t"
    if "choices" in answer.json():
        chunks = events(post(client, path, stop=["lo t"], include_stop_str_in_output=True, stream=True).text)
        parts = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
        assert "".join(part.get("text", part.get("delta", {}).get("content")) or "" for part in parts) == "Hello t"


@EVERYWHERE
def test_the_limit_has_many_names(client: TestClient, engine: FakeEngine, path: str) -> None:
    assert asked(client, engine, path, max_tokens=0).max_tokens == 0
    if path == "/v1/messages":
        return  # max_tokens is required and goes first
    assert asked(client, engine, path, n_predict=7).max_tokens == 7
    assert asked(client, engine, path, n_predict=7, max_tokens=5).max_tokens == 5
    assert asked(client, engine, path, n_predict=-1).max_tokens > 1000
    assert asked(client, engine, path, max_tokens=-1).max_tokens > 1000
    assert asked(client, engine, path, n_predict=7, max_tokens=-1).max_tokens > 1000
    assert asked(client, engine, path, n_predict=0).max_tokens == 0
    assert "max_tokens" in refusal(client, path, max_tokens=-2)
    if path == "/v1/responses":
        assert asked(client, engine, path, max_output_tokens=-1).max_tokens > 1000
        assert asked(client, engine, path, max_output_tokens=0).max_tokens == 0
        assert asked(client, engine, path, max_output_tokens=3, max_tokens=5).max_tokens == 3


NEUTRAL: dict[str, list[Any]] = {
    "mirostat": [0], "top_n_sigma": [-1, 0.0, -1.0], "top_a": [0], "tfs_z": [1, 1.0],
    "tfs": [1], "dynatemp_range": [0], "use_beam_search": [False], "truncate_prompt_tokens": [None],
    "prompt_logprobs": [None], "documents": [[], None], "stop_token_ids": [[]], "repeat_penalty": [1, None],
    "mirostat_tau": [5.0],
}  # fmt: skip
REFUSED: list[tuple[str, Any]] = [
    ("mirostat", 2), ("mirostat", True), ("top_n_sigma", 1), ("top_a", 0.5), ("tfs_z", 0.9),
    ("tfs", 0.9), ("dynatemp_range", 0.5), ("use_beam_search", True), ("truncate_prompt_tokens", 100),
    ("truncate_prompt_tokens", -1), ("prompt_logprobs", 0), ("prompt_logprobs", 5), ("documents", "x"),
    ("stop_token_ids", [-1]), ("stop_token_ids", [10**6]), ("stop_token_ids", ["5"]), ("stop_token_ids", 5),
    ("stop_token_ids", [0] * 1025), ("min_tokens", -1),
    ("repeat_penalty", 0), ("repeat_penalty", 11), ("repetition_penalty", 0), ("presence_penalty", 3),
    ("frequency_penalty", -3), ("include_stop_str_in_output", 1), ("n_predict", "x"), ("temperature", -0.1),
    ("temperature", 2.1), ("temperature", "hot"), ("temperature", True), ("top_p", -0.1), ("top_p", 1.5), ("top_k", -2),
    ("top_k", 1.5), ("min_p", 2), ("seed", "x"), ("seed", 1e30), ("logit_bias", [1]), ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 101}), ("logit_bias", {"1": True}), ("logit_bias", {"999999": 1}), ("guided_regex", "a"),
    ("guided_grammar", 'start: "a"'), ("specprefill", "yes"), ("specprefill", 1), ("specprefill_scope", "documents"),
    ("specprefill_keep_pct", 0), ("specprefill_keep_pct", 1.01), ("specprefill_keep_pct", -0.2),
    ("specprefill_keep_pct", "0.2"), ("specprefill_keep_pct", True), ("specprefill_keep_pct", [0.2]),
    ("specprefill_keep_pct", "auto"), ("specprefill_verify", "wait"), ("specprefill_return_spans", 1),
    ("speculative", "fast"), ("speculative", True), ("model", 5), ("stream", "true"),
]  # fmt: skip
# One of each kind: by name, by value, by the vocabulary, of ours.
SAMPLES: list[tuple[str, Any]] = [
    ("mirostat", 2), ("documents", [{"text": "x"}]), ("top_p", 2), ("stop_token_ids", [10**6]),
    ("specprefill_keep_pct", 2),
]  # fmt: skip


@EVERYWHERE
def test_neutral_values_change_nothing(client: TestClient, engine: FakeEngine, path: str) -> None:
    plain = asked(client, engine, path)
    for name, values in NEUTRAL.items():
        for value in values:
            assert comparable(asked(client, engine, path, **{name: value})) == comparable(plain), name


def accepted(client: TestClient, path: str, cases: list[tuple[str, Any]]) -> list[tuple[str, Any, str]]:
    """Return the cases that are not a 400 which names the field."""
    answers = [(name, value, post(client, path, **{name: value})) for name, value in cases]
    return [(name, value, answer.text) for name, value, answer in answers if not names_field(answer, name)]


def names_field(answer: Any, name: str) -> bool:
    error = answer.json().get("error", {})
    return answer.status_code == 400 and error.get("param", name).startswith(name) and error["message"].startswith(name)


def test_what_is_not_done_is_refused_by_name(client: TestClient, engine: FakeEngine) -> None:
    assert accepted(client, "/v1/chat/completions", REFUSED) == []
    assert not engine.requests


@EVERYWHERE
def test_every_dialect_refuses_it(client: TestClient, engine: FakeEngine, path: str) -> None:
    assert accepted(client, path, SAMPLES) == []
    assert not engine.requests


# What is sent, and the fields that the warning names.
IGNORED: list[tuple[dict[str, Any], str]] = [
    ({"dry_multiplier": 0.8, "dry_base": 1.75, "dry_sequence_breakers": ["x"]},
     "dry_multiplier, dry_base, dry_sequence_breakers"),
    ({"dry_multiplier": "x", "dry_allowed_length": -1, "dry_penalty_last_n": 64},
     "dry_multiplier, dry_allowed_length, dry_penalty_last_n"),
    ({"dry_multiplier": 0, "dry_base": 2, "dry_allowed_length": 2, "dry_penalty_last_n": -1}, ""),
    ({"dry_multiplier": 0.0, "dry_sequence_breakers": ["\n"]}, ""), ({"dry_base": 2}, ""),
    ({"dry_multiplier": None}, ""),
    ({"xtc_probability": 0.5, "xtc_threshold": 0.1, "temperature": 0}, "xtc_probability, xtc_threshold"),
    ({"xtc_probability": 0, "xtc_threshold": 0.1}, ""), ({"xtc_threshold": 0.2}, ""),
    ({"typical_p": 0.5}, "typical_p"), ({"typical_p": 1}, ""), ({"typical_p": 1.0}, ""),
    ({"bad_words": ["a"]}, "bad_words"), ({"bad_words": []}, ""), ({"bad_words": None}, ""),
    ({"allowed_token_ids": [65]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": None}, ""),
    ({"bad_words": ["a"], "typical_p": 0.5}, "typical_p, bad_words"),
]  # fmt: skip


@EVERYWHERE
@pytest.mark.parametrize(("fields", "named"), IGNORED)
def test_what_has_no_effect_is_named(
    client: TestClient, engine: FakeEngine, path: str, fields: dict[str, Any], named: str
) -> None:
    warned = [f"{named}: not supported, and without effect here"] if named else None
    plain = comparable(asked(client, engine, path))
    assert post(client, path, **fields).json().get("warnings") == warned
    assert comparable(engine.requests[-1]) == plain


@EVERYWHERE
def test_a_mistyped_field_of_ours_is_named(client: TestClient, path: str) -> None:
    typed = {"specprefil_keep_pct": "specprefill_keep_pct", "loopGuard": "loop_guard", "cachesalt": "cache_salt"}
    answer = post(client, path, speed="fast", **dict.fromkeys(typed, 1)).json()
    said = {
        f"{name}: no field of this server, and without effect; did you mean {near}?" for name, near in typed.items()
    }
    assert set(answer["warnings"]) == said


@EVERYWHERE
def test_streams_name_it_too(client: TestClient, path: str) -> None:
    assert "typical_p: not supported" in post(client, path, typical_p=0.5, stream=True).text


@EVERYWHERE
def test_two_names_for_one_penalty_have_to_agree(client: TestClient, engine: FakeEngine, path: str) -> None:
    same = asked(client, engine, path, repeat_penalty=1.2, repetition_penalty=1.2)
    assert same.sampling.repetition_penalty == 1.2
    assert "repeat_penalty" in refusal(client, path, repeat_penalty=1.2, repetition_penalty=1.3)


def test_echo_is_for_raw_prompts(client: TestClient, engine: FakeEngine) -> None:
    for path in ("/v1/chat/completions", "/v1/responses"):
        assert "echo" in refusal(client, path, echo=True)
        assert post(client, path, echo=False).status_code == 200
    assert text_of(post(client, "/v1/completions", echo=True).json()) == "HiHello"


WITH_DOCUMENTS = "{% for d in documents %}<doc {{ d.title }}>{{ d.text }}</doc>{% endfor %}" + CHATML


def test_documents_go_to_a_template_that_has_a_place_for_them(engine: FakeEngine) -> None:
    engine.pair = FakePair(tokenizer=byte_tokenizer(WITH_DOCUMENTS))
    client = client_of(engine)
    documents = [{"title": "A", "text": "It says <|im_end|>."}]
    request = asked(client, engine, "/v1/chat/completions", documents=documents)
    prompt = engine.pair.tokenizer.decode(list(request.prompt))
    assert prompt.startswith("<doc A>It says <|im_end|>.</doc><|im_start|>user\nHi<|im_end|>")
    assert list(request.prompt).count(engine.pair.tokenizer.eos_token_id) == 1  # a document's text is no structure


@EVERYWHERE
def test_a_mistyped_field_of_ours_is_refused_by_name(client: TestClient, path: str) -> None:
    for field, meant in (("specprefill_keep", "specprefill_keep_pct"), ("specprefill_forced", "specprefill_rule")):
        answer = post(client, path, **{field: 1})
        assert (answer.status_code, field in answer.text, meant in answer.text) == (400, True, True), answer.text
    assert post(client, path, specprefil=1).status_code == 200  # not one of ours: fields of others are ignored
