"""The explain endpoint, against the engine's inspection and the prompt's own text."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specprefill import InvalidRequestError, SparseUnsupportedError
from mlx_specprefill_server import request_body

from .conftest import client_of
from .fakes import FakeEngine
from .test_live import leave

PATH = "/v1/specprefill/explain"
TEXT = "The secret code for Anna is 471128. " * 9 + "<script>alert(1)</script> 🎉é"


def explain(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("body", [{"prompt": TEXT}, {"messages": [{"role": "user", "content": TEXT}]}])
def test_chunks_tile_the_prompt_and_carry_its_text(client: TestClient, engine: FakeEngine, body: Any) -> None:
    answer = explain(client, **body)
    chunks = answer["chunks"]
    assert answer["tokens"] == list(engine.requests[0].prompt)
    assert [chunk["start"] for chunk in chunks] == [0, *(chunk["end"] for chunk in chunks[:-1])]
    assert chunks[-1]["end"] == answer["prompt_tokens"] == len(answer["tokens"])
    assert TEXT in "".join(chunk["text"] for chunk in chunks)
    assert sorted(chunk["rank"] for chunk in chunks) == list(range(1, len(chunks) + 1))
    assert sum(end - start for start, end in answer["kept_spans"]) == answer["kept_tokens"]


def test_every_chunk_says_why(client: TestClient) -> None:
    first, second, third, *_ = explain(client, prompt=TEXT)["chunks"]
    assert first["forced"]
    assert first["reason"] == "kept by rule: first chunk"
    assert (second["kept"], third["kept"]) == (False, True)
    assert second["reason"].startswith("dropped, score 2 of ")
    assert third["reason"].startswith("kept for its score, 3 of ")


def test_lines_that_ask_are_named(client: TestClient) -> None:
    answer = explain(client, prompt=TEXT)
    assert answer["asking"] == [[answer["prompt_tokens"] - 4, answer["prompt_tokens"]]]
    asking = [chunk["reason"].endswith("; asks for what is kept") for chunk in answer["chunks"]]
    assert asking == [False] * (len(asking) - 1) + [True]


def test_predicted_times_and_options(client: TestClient, engine: FakeEngine) -> None:
    answer = explain(client, prompt=[1, 2, 3], specprefill_keep_pct=0.5)
    assert answer["predicted"] == {"full_ms": 2000.0, "sparse_ms": 500.0}
    assert engine.requests[0].prompt.tolist() == [1, 2, 3]
    assert str(engine.requests[0].specprefill.keep_pct) == "1/2"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "specprefill_keep_pct": 0}, "specprefill_keep_pct"),
        ({"prompt": "a" * 5000}, "prompt"),
    ],
)
def test_refusals_name_the_field(client: TestClient, body: Any, param: str) -> None:
    response = client.post(PATH, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_without_a_draft_there_is_nothing_to_explain(client: TestClient, engine: FakeEngine) -> None:
    engine.inspected = SparseUnsupportedError("no draft model is loaded")
    response = client.post(PATH, json={"prompt": "a"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "sparse_unsupported"


def test_an_inspection_that_fails_is_the_requests_own_failure(client: TestClient, engine: FakeEngine) -> None:
    engine.inspected = InvalidRequestError("no", field="prompt")
    assert client.post(PATH, json={"prompt": "a"}).status_code == 400
    engine.inspected = None
    assert client.post(PATH, json={"prompt": "a"}).status_code == 200


def test_a_body_above_the_limit_is_refused(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_LIMIT", 100)
    assert client_of(engine).post(PATH, json={"prompt": "a" * 200}).status_code == 413


def test_a_client_that_leaves_ends_the_inspection(engine: FakeEngine, base: str) -> None:
    engine.inspected = threading.Event()
    leave(base, (PATH, {"prompt": "a"}), False, lambda: bool(engine.handles))
    assert engine.handles[0].cancelled.wait(60)
