"""Bodies that are large, dense or wrong in a million places: refused soon, and never on everybody's time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.testclient import TestClient

from mlx_specprefill import InvalidRequestError
from mlx_specprefill_server import request_body
from mlx_specprefill_server.anthropic import messages
from mlx_specprefill_server.big_json import DEEPEST
from mlx_specprefill_server.http.errors import ApiError
from mlx_specprefill_server.openai import chat, completions, decisions, responses
from mlx_specprefill_server.routes import prompts
from mlx_specprefill_server.settings.server import Settings
from tests.support.application import app_over

from .fakes import FakeEngine

STALL_S = 2.0  # far above what a busy machine needs; without the limits it is tens of seconds
WRONG: Any = ([{}] * 100, [1] * 100, ["x"] * 100, {str(i): [] for i in range(100)}, [[1.5] * 100])


def posted(engine: FakeEngine, path: str, body: bytes) -> tuple[httpx.Response, float]:
    """The answer, and the longest time for which the event loop did nothing else."""

    async def post() -> tuple[httpx.Response, float]:
        ticker = asyncio.create_task(longest_stall())
        transport = httpx.ASGITransport(app_over(engine, Settings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post(path, content=body, timeout=120)
        await asyncio.sleep(0.05)  # for the ticker to see the last one
        ticker.cancel()
        return answer, await ticker

    return asyncio.run(post())


async def longest_stall() -> float:
    """Until it is cancelled."""
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest


MEAN = {
    "texts for tokens": ("/detokenize", b'{"tokens": [' + b'"x",' * 1_000_000 + b"1]}"),
    "objects for tokens": ("/detokenize", b'{"tokens": [' + b"{}," * 1_000_000 + b"1]}"),
    "strings in a string": ("/tokenize", b'{"content": "' + rb"\"" * 4_000_000),
    "arrays": ("/v1/chat/completions", b'{"messages": [' + b"[]," * 2_000_000 + b"1]}"),
    "numbers for a prompt": ("/v1/specprefill/explain", b'{"prompt": [' + b"0.5," * 900_000 + b"1]}"),
    "metadata": (
        "/v1/responses",
        b'{"input": "a", "metadata": {' + b",".join(b'"%d":1' % i for i in range(600_000)) + b"}}",
    ),
    "stops": ("/v1/messages", b'{"messages": [], "max_tokens": 1, "stop_sequences": [' + b"1," * 900_000 + b"1]}"),
    "messages": ("/v1/chat/completions", b'{"messages": [' + b"1," * 900_000 + b"1]}"),
}


@pytest.mark.extended
@pytest.mark.parametrize(("path", "body"), MEAN.values(), ids=list(MEAN))
def test_a_mean_body_stops_nobody_else(engine: FakeEngine, path: str, body: bytes) -> None:
    answer, stall = posted(engine, path, body)
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 1000
    assert stall < STALL_S


def models() -> Iterator[tuple[str, type[BaseModel]]]:
    for module in (chat, completions, decisions, responses, messages, prompts, prompts, prompts):
        for route in module.router.routes:
            assert isinstance(route, APIRoute)
            for dependency in route.dependant.dependencies:
                if hasattr(dependency.call, "body_model"):
                    yield route.path, dependency.call.body_model


def test_no_field_of_any_endpoint_has_more_than_a_few_errors(client: TestClient) -> None:
    """Each is made in full, however many there are, before the first can be read."""
    found = dict(models())
    document = client.get("/openapi.json").json()["paths"]
    posts = {path for path, methods in document.items() if "requestBody" in methods.get("post", {})}
    assert set(found) == posts
    for path, model in found.items():
        for name in model.model_fields:
            for wrong in WRONG:
                assert errors(model, {name: wrong}) < 20, (path, name)


def errors(model: type[BaseModel], body: Any) -> int:
    try:
        model.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    except InvalidRequestError:
        pass
    return 0


def test_commas_and_brackets_in_texts_are_no_values() -> None:
    text = '[{,\\"' * 500_000
    assert request_body.parse_json(bytearray(orjson.dumps({"prompt": text, "none": None}))) == {"prompt": text}


MANY = {
    "values": b'{"a": [%s1]}' % (b"1," * (1 << 20)),
    "containers": b'{"a": [%s1]}' % (b"[]," * (1 << 17)),
    "strings": b'{"a": %s}' % (b'""' * (1 << 17)),
    "members": b'{"a": {%s}}' % b",".join(b'"%d" \n:1' % i for i in range(1 << 15)),
}


@pytest.mark.parametrize("body", MANY.values(), ids=list(MANY))
def test_more_than_any_request_has_is_refused_unparsed(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orjson, "loads", None)
    told = "more than 1048576 values, 65536 arrays and objects, or 32768 members of objects"
    with pytest.raises(ApiError, match=told):
        request_body.parse_json(bytearray(body))


def test_nesting_is_limited_in_arrays_and_objects_alike() -> None:
    def nested(levels: int) -> bytearray:
        return bytearray(b'{"a": ' + b'[{"b": ' * (levels // 2) + b"1" + b"}]" * (levels // 2) + b"}")

    request_body.parse_json(nested(DEEPEST - 2))
    with pytest.raises(ApiError, match="nested too deeply"):
        request_body.parse_json(nested(DEEPEST))


TALK = [{"role": "user", "content": "a"}]
NAMED = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": TALK, "max_tokens": 1},
    "/tokenize": {"content": "a"},
}


@pytest.mark.parametrize(("path", "body"), NAMED.items())
def test_a_long_name_of_a_model_is_refused_and_not_repeated(client: TestClient, path: str, body: Any) -> None:
    assert client.post(path, json=body | {"model": "m" * 256}).status_code == 200
    answer = client.post(path, json=body | {"model": "m" * 257})
    assert answer.status_code == 400
    assert "model: must have at most 256 characters" in answer.text
    assert "mmm" not in answer.text
    assert "mmm" not in client.get("/v1/models/" + "m" * 257).text


def test_a_body_that_announces_too_much_is_refused_unread(client: TestClient) -> None:
    def never() -> Iterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    answer = client.post("/tokenize", content=never(), headers={"content-length": str(1 << 40)})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
