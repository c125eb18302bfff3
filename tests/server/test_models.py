from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from openai.types import Model
from starlette.testclient import TestClient

from .conftest import client_of
from .fakes import CHATML, FakeEngine, FakePair


def test_the_list_and_the_model(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    Model.model_validate(model, strict=True)
    assert model["id"] == "demo/target"
    assert model["draft"] == "demo/draft"
    assert model["draft_tokenizer"] == {"kind": "same tokenizer", "aligned": 1}
    assert (
        model["context_length"] == model["context_window"] == model["max_model_len"] == model["meta"]["n_ctx"] == 4096
    )
    assert model["specprefill"] == {"available": True, "reason": None}
    assert client.get("/v1/models/demo/target").json() == model


def test_a_model_served_dense_says_why(engine: FakeEngine) -> None:
    engine.pair = FakePair(draft_id=None)
    model = client_of(engine).get("/v1/models").json()["data"][0]
    assert (model["draft"], model["draft_tokenizer"]) == (None, None)
    assert model["specprefill"] == {"available": False, "reason": "no draft model is loaded"}
    engine.pair = FakePair(sparse_refusal="ALiBi positions can't be moved")
    model = client_of(engine).get("/v1/models").json()["data"][0]
    assert model["specprefill"] == {"available": False, "reason": "ALiBi positions can't be moved"}


def test_a_draft_with_another_tokenizer_says_so(engine: FakeEngine) -> None:
    engine.pair = FakePair(mapping=SimpleNamespace(aligned=0.99951234))
    model = client_of(engine).get("/v1/models").json()["data"][0]
    assert model["draft_tokenizer"] == {"kind": "mapped by text", "aligned": 0.999512}


def test_an_unknown_model(client: TestClient) -> None:
    answer = client.get("/v1/models/org/other")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert answer.json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("target", "shown"),
    [("org/model-4bit", "org/model-4bit"), ("/home/me/models/mine", "mine"), ("./mine/", "mine"), ("mine", "mine")],
)
def test_ids_are_no_paths(engine: FakeEngine, target: str, shown: str) -> None:
    engine.pair = FakePair(target_id=target)
    assert client_of(engine).get("/v1/models").json()["data"][0]["id"] == shown


def test_an_alias_replaces_the_id(engine: FakeEngine) -> None:
    client = client_of(engine, model_alias="house/model")
    assert client.get("/v1/models/house/model").status_code == 200
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert answer.json()["model"] == "house/model"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
        ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses/input_tokens", {"input": "Hi"}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/tokenize", {"content": "Hi"}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/apply-template", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/specprefill/explain", {"prompt": "Hi " * 99}),
    ],
)
def test_an_answer_to_another_name_says_whose_it_is(engine: FakeEngine, path: str, body: dict[str, Any]) -> None:
    client = client_of(engine)
    for name, warned in (("gpt-4o-mini", True), ("demo/target", False)):
        answer = client.post(path, json={**body, "model": name})
        assert answer.status_code == 200
        said = "model: this server has no 'gpt-4o-mini'; 'demo/target' answers instead"
        assert answer.json().get("warnings", []) == ([said] if warned else [])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/props"),
        ("GET", "/v1/specprefill/stats"),
        ("GET", "/v1/specprefill/cache"),
        ("DELETE", "/v1/specprefill/cache"),
    ],
)
def test_a_query_that_names_another_model_is_told_so(engine: FakeEngine, method: str, path: str) -> None:
    client, strict = client_of(engine), client_of(engine, strict_model=True)
    for name, warned in (("gpt-4o-mini", True), ("demo/target", False)):
        said = [f"model: this server has no {name!r}; 'demo/target' answers instead"]
        answer = client.request(method, f"{path}?model={name}")
        assert answer.json().get("warnings", []) == (said if warned else [])
        assert strict.request(method, f"{path}?model={name}").status_code == (404 if warned else 200)
    assert "warnings" not in client.request(method, path).json()


def test_llama_cpps_clients_read_window_and_template(client: TestClient, engine: FakeEngine) -> None:
    engine.room = 100
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 100
    assert props["chat_template"] == CHATML
    assert props["model_alias"] == props["model_path"] == "demo/target"
    assert (props["bos_token"], props["eos_token"]) == ("", "<|im_end|>")
    assert props["total_slots"] == 4


def test_any_name_will_do_unless_names_are_strict(engine: FakeEngine) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for name in ("demo/target", "gpt-4o-mini", None):
        assert client_of(engine).post("/v1/chat/completions", json={**body, "model": name}).status_code == 200
    strict = client_of(engine, strict_model=True)
    assert strict.post("/v1/chat/completions", json={**body, "model": "demo/target"}).status_code == 200
    assert strict.post("/v1/chat/completions", json=body).status_code == 200
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        answer = strict.post(path, json={**body, "model": "gpt-4o-mini"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert answer.json()["error"]["param"] == "model"


def test_the_window_is_the_memorys_where_that_is_less_than_the_models(client: TestClient, engine: FakeEngine) -> None:
    engine.room = 100
    for shown in (client.get("/v1/models").json()["data"][0], client.get("/v1/models/demo/target").json()):
        assert {shown[name] for name in ("context_length", "context_window", "max_model_len", "max_input_tokens")} == {
            100
        }
        assert shown["meta"] == {"n_ctx": 100, "n_ctx_train": 4096}
    body = {"messages": [{"role": "user", "content": "x" * 120}]}
    error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert (error["code"], error["n_ctx"]) == ("context_length_exceeded", 100)
    said = client.post("/v1/messages", json=body | {"max_tokens": 5}).json()["error"]["message"]
    assert said.endswith("> 100 maximum")
    short = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5000}
    assert client.post("/v1/chat/completions", json=short).status_code == 200
    assert engine.requests[-1].max_tokens + len(engine.requests[-1].prompt) == 100
