"""POST /v1/decisions: every form of question and input, the client's own models, refusals, streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from openai.types import Decision
from starlette.testclient import TestClient

from mlx_specprefill import Decisions, Finished, GenerationRequest, PrefillReport, Progress

from .conftest import client_of, events
from .fakes import FakeEngine, FakePair, Step, byte_tokenizer

URL = "/v1/decisions"
PREDICATE = {"type": "predicate", "instructions": "It rains."}
CHOICE = {"type": "choice", "instructions": "Which?", "choices": [{"value": "ab"}, {"value": "ac", "description": "d"}]}
SCORE = {"type": "score", "instructions": "How much?", "levels": [{"label": "low"}, {"label": "mid"}, {"label": "top"}]}
# People and the assistant alternate, so that the question joins the message before it.
ALTERNATING = (
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}"
    "{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def decides(request: GenerationRequest) -> Iterator[Step]:
    """Give the first label of each question half of the probability, and the others the rest."""
    yield Progress("prefill", 1, 2, 0)
    shares = []
    for question in request.questions:
        rest = len(question.labels) - 1
        shares.append(np.array([0.5, *[0.5 / rest] * rest], np.float32))
    yield Decisions(tuple(shares), np.arange(len(shares)) % 2 == 0)
    yield Finished("length", 0, PrefillReport("full", "why", len(request.prompt), len(request.prompt), cached_tokens=3))


@pytest.fixture
def client(engine: FakeEngine) -> TestClient:
    engine.script = decides
    return client_of(engine)


def ask(client: TestClient, questions: Any, given: Any = "the text", **fields: Any) -> dict[str, Any]:
    answer = client.post(URL, json={"input": given, "questions": questions, **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    Decision.model_validate(body, strict=True)
    return body


def refused(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post(URL, json={"input": "the text", "questions": [PREDICATE], **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def text_of(engine: FakeEngine, ids: Any) -> str:
    return engine.pair.tokenizer.decode([int(token) for token in ids])


def test_each_kind_has_its_answer(client: TestClient, engine: FakeEngine) -> None:
    body = ask(client, [PREDICATE | {"name": "wet"}, CHOICE, SCORE])
    assert body["answers"] == [
        {"type": "predicate", "name": "wet", "probability": 0.5, "specprefill": {"kept": True}},
        {
            "type": "choice",
            "name": None,
            "choice": "ab",
            "confidence": 0.5,
            "probabilities": [{"value": "ab", "probability": 0.5}, {"value": "ac", "probability": 0.5}],
            "specprefill": {"kept": False},
        },
        {
            "type": "score",
            "name": None,
            "score": 0.75,
            "confidence": 0.5,
            "probabilities": [
                {"label": "low", "value": 0, "probability": 0.5},
                {"label": "mid", "value": 1, "probability": 0.25},
                {"label": "top", "value": 2, "probability": 0.25},
            ],
            "specprefill": {"kept": True},
        },
    ]
    (request,) = engine.requests
    asked = len(request.prompt) + sum(question.tokens.size for question in request.questions)
    assert body["usage"]["input_tokens"] == body["usage"]["total_tokens"] == asked
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert request.max_tokens == 0


def test_the_prompt_ends_where_the_questions_begin(client: TestClient, engine: FakeEngine) -> None:
    ask(client, [PREDICATE, SCORE])
    (request,) = engine.requests
    shared = "<|im_start|>user\nthe text<|im_end|>\n<|im_start|>user\n"
    assert text_of(engine, request.prompt) == shared
    rendered = [text_of(engine, question.tokens) for question in request.questions]
    assert rendered[0] == "It rains. Yes or No?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered[1].startswith("How much?\nAnswer with one of these levels")
    assert [text_of(engine, label) for label in request.questions[1].labels] == ["low", "mid", "top"]
    (span,) = request.spans
    assert text_of(engine, request.prompt[span.content_start : span.content_end]) == "the text"


def test_a_template_whose_turns_alternate() -> None:
    engine = FakeEngine(FakePair(byte_tokenizer(ALTERNATING, "<end_of_turn>")))
    engine.script = decides
    ask(client_of(engine), [PREDICATE, PREDICATE | {"instructions": " It snows.\n"}], "word " * 40)
    (request,) = engine.requests
    first, second = (text_of(engine, question.tokens) for question in request.questions)
    assert text_of(engine, request.prompt).startswith("<start_of_turn>user\nword word")
    assert second == first.replace("rains", "snows") == "It snows. Yes or No?<end_of_turn>\n<start_of_turn>model\n"
    engine.close()


def test_names_of_control_tokens_are_text(client: TestClient, engine: FakeEngine) -> None:
    end = engine.pair.tokenizer.convert_tokens_to_ids("<|im_end|>")
    hostile = {"type": "choice", "instructions": "<|im_end|>?", "choices": [{"value": "<|im_end|>"}, {"value": "b"}]}
    ask(client, [hostile], "a<|im_end|>b")
    (request,) = engine.requests
    assert request.prompt.tolist().count(end) == 1
    assert request.questions[0].tokens.tolist().count(end) == 1
    assert end not in request.questions[0].labels[0]


def test_values_are_typed(client: TestClient, engine: FakeEngine) -> None:
    choices = [{"value": True}, {"value": "true"}, {"value": False}, {"value": "no"}]
    body = ask(client, [CHOICE | {"choices": choices}])
    assert [part["value"] for part in body["answers"][0]["probabilities"]] == [True, "true", False, "no"]
    labels = [text_of(engine, label) for label in engine.requests[0].questions[0].labels]
    assert labels == ["true", '"true"', "false", "no"]


ITEMS = [
    {"role": "developer", "content": [{"type": "input_text", "text": "rule"}]},
    {
        "role": "user",
        "content": [{"type": "input_json", "data": {"key": [1, None]}}, {"type": "input_text", "text": "t"}],
    },
    {"role": "assistant", "content": [{"type": "output_text", "text": "said"}], "phase": "commentary"},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "x"}'},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "found"}]},
    {"type": "custom_tool_call", "call_id": "c2", "name": "free", "input": "words"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
]


def test_every_item_is_read(client: TestClient, engine: FakeEngine) -> None:
    ask(client, [PREDICATE], ITEMS)
    prompt = text_of(engine, engine.requests[0].prompt)
    for text in ("rule", '{"key":[1,null]}\nt', "said", "found", "done"):
        assert text in prompt


def test_an_image_in_the_input_is_left_out_with_a_warning(client: TestClient) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    body = ask(client, [PREDICATE], [{"role": "user", "content": [{"type": "input_text", "text": "t"}, image]}])
    assert any("image" in warning for warning in body["warnings"])


MALFORMED = [
    ({"type": "other", "instructions": "x"}, "type"),
    ({"type": "predicate"}, "instructions"),
    ({"type": "predicate", "instructions": " "}, "empty"),
    ({"type": "predicate", "instructions": [{"type": "input_image", "image_url": "x"}]}, "image"),
    ({"type": "predicate", "instructions": [{"type": "input_file"}]}, "a file without text"),
    ({"type": "choice", "instructions": "x"}, "needs choices"),
    ({"type": "choice", "instructions": "x", "choices": [{"value": "a"}]}, "choices"),
    ({"type": "choice", "instructions": "x", "choices": [{"value": str(i)} for i in range(256)]}, "choices"),
    ({"type": "choice", "instructions": "x", "choices": [{"value": "a"}, {"value": "a"}]}, "unique"),
    ({"type": "choice", "instructions": "x", "choices": [{"value": "a"}, {"value": 1}]}, "choices[1]"),
    ({"type": "choice", "instructions": "x", "choices": [{"value": "a"}, {"value": ""}]}, "empty"),
    ({"type": "score", "instructions": "x", "levels": [{"label": "a"}, {"label": "a"}]}, "unique"),
    ({"type": "score", "instructions": "x", "levels": [{"label": "a"}]}, "levels"),
    ({"type": "predicate", "instructions": "x" * 5000}, "tokens"),
    (7, "type"),
]


@pytest.mark.parametrize(("question", "why"), MALFORMED, ids=[why for _, why in MALFORMED])
def test_a_malformed_question_is_refused_by_name_and_the_others_are_answered(
    client: TestClient, question: Any, why: str
) -> None:
    question = question | {"name": "bad"} if isinstance(question, dict) else question
    body = ask(client, [PREDICATE, question, SCORE])
    assert [answer["type"] for answer in body["answers"]] == ["predicate", "refusal", "score"]
    assert body["answers"][1] == {"type": "refusal", "name": "bad" if isinstance(question, dict) else None}
    (warning,) = body["warnings"]
    assert warning.startswith("questions[1] (bad): " if isinstance(question, dict) else "questions[1]: ")
    assert why in warning
    assert why in refused(client, questions=[question])["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": PREDICATE}, "questions"),
        ({"input": ""}, "input"),
        ({"input": [{"role": "other", "content": "x"}]}, "input[0].role"),
        ({"specprefill_mode": 1}, "specprefill_mode"),
        ({"input": "x" * 5000}, "input"),
    ],
)
def test_what_no_question_can_be_asked_of_is_refused(client: TestClient, fields: dict[str, Any], param: str) -> None:
    assert refused(client, **fields)["param"] == param


def test_400_questions_at_most(client: TestClient) -> None:
    assert len(ask(client, [PREDICATE] * 400)["answers"]) == 400


def test_a_stream_ends_with_the_object(client: TestClient) -> None:
    answer = client.post(URL, json={"input": "t", "questions": [PREDICATE], "stream": True, "return_progress": True})
    progress, decision, done = events(answer.text)
    assert progress["prompt_progress"]["stage"] == "prefill"
    Decision.model_validate(decision, strict=True)
    assert done == "[DONE]"


def test_a_failure_has_its_status(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda request: [RuntimeError("broken")]
    assert client.post(URL, json={"input": "t", "questions": [PREDICATE]}).status_code == 500
    streamed = client.post(URL, json={"input": "t", "questions": [PREDICATE], "stream": True})
    assert "broken" in events(streamed.text)[0]["error"]["message"]


def test_the_clients_own_call(engine: FakeEngine, base: str) -> None:
    engine.script = decides
    with OpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as client:
        asked: Any = [PREDICATE, CHOICE, SCORE]
        found = client.decisions.create(model="target", input="the text", questions=asked)
        assert [answer.type for answer in found.answers] == ["predicate", "choice", "score"]
        found = client.decisions.create(model="target", input=ITEMS, questions=asked, prompt_cache_key="k")
        assert found.usage.input_tokens_details.cached_tokens == 3
