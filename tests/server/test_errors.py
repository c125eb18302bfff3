from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specprefill import EngineError, InvalidRequestError, RequestCancelled, SparseUnsupportedError
from mlx_specprefill_server.errors import api_error

from .fakes import FakeEngine


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "unknown_url"),
        ("POST", "/v1/nowhere", 404, "unknown_url"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/docs", 404, "unknown_url"),
        ("GET", "/openapi.json", 404, "unknown_url"),
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
    if status == 405:
        assert answer.headers["allow"]


def test_an_unforeseen_failure_is_a_500_without_details(client: TestClient, engine: FakeEngine) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a detail")

    engine.submit = broken  # type: ignore[method-assign]
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
