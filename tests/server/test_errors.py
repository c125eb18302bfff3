from __future__ import annotations

from typing import Any

import orjson
import pytest
from starlette.testclient import TestClient

from mlx_specprefill import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    RequestCancelled,
    SparseUnsupportedError,
)
from mlx_specprefill_server.http.errors import ApiError, api_error, error_response

from .conftest import client_of
from .fakes import FakeEngine


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "unknown_url"),
        ("POST", "/v1/nowhere", 404, "unknown_url"),
        ("GET", "/v1/models/nobody", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/docs", 404, "unknown_url"),
    ],
)
def test_every_path_answers_in_openais_shape(
    client: TestClient, method: str, path: str, status: int, code: str
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert error["message"]
    assert code != "unknown_url" or path in error["message"]
    if status == 405:
        assert answer.headers["allow"]


def test_an_unforeseen_failure_is_a_500_without_details(client: TestClient, engine: FakeEngine) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a detail")

    engine.submit = broken
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "a detail" not in answer.text
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError("x"), 400),
        (SparseUnsupportedError("x"), 500),
        (EngineError("x"), 500),
        (RequestCancelled("x"), 503),
        (KeyError("x"), 500),
    ],
)
def test_the_mapping(error: Exception, status: int) -> None:
    assert api_error(error).status == status


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequestError("x"), 400, "invalid_request_error"),
        (ApiError(401, "x"), 401, "authentication_error"),
        (ApiError(403, "x"), 403, "permission_error"),
        (ApiError(404, "x"), 404, "not_found_error"),
        (ApiError(405, "x"), 405, "invalid_request_error"),
        (ApiError(413, "x"), 413, "request_too_large"),
        (EngineError("x"), 500, "api_error"),
        (KeyError("x"), 500, "api_error"),
        (EngineClosedError("x"), 529, "overloaded_error"),
    ],
)
def test_anthropics_shape_by_path(error: Exception, status: int, kind: str) -> None:
    answer = error_response(error, "/v1/messages/count_tokens")
    body = orjson.loads(answer.body)
    assert set(body) == {"type", "error"}
    assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["error"]["message"]
    assert ("retry-after" in answer.headers) == (status == 529)
    assert ("x-should-retry" in answer.headers) == (status != 529)
    assert "type" not in orjson.loads(error_response(error, "/v1/messagesx").body)


def test_refusals_before_any_route_take_the_paths_shape(engine: FakeEngine) -> None:
    client = client_of(engine, api_keys=("k",))
    for path in ("/v1/messages", "/v1/messages/nowhere"):
        answer = client.post(path, json={})
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        assert (
            client.post(path, json={}, headers={"host": "evil.example"}).json()["error"]["type"] == "permission_error"
        )
    answer = client.post("/v1/messages/nowhere", json={}, headers={"x-api-key": "k"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
