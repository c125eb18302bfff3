from __future__ import annotations

import pytest

from .conftest import client_of
from .fakes import FakeEngine

BODY = '{"messages":[{"role":"user","content":"Hi"}]}'
CHAT = "/v1/chat/completions"
KEYS = ("key-one", "kéy-two")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer key-one"},
        {"authorization": "bearer  key-one"},
        {"x-api-key": "key-one"},
        {"authorization": "Bearer kéy-two".encode()},
        {"authorization": "Basic xyz", "x-api-key": "key-one"},
        {"authorization": "Bearer of-another-service", "x-api-key": "key-one"},
    ],
)
def test_every_key_opens(engine: FakeEngine, headers: dict[str, str]) -> None:
    client = client_of(engine, api_keys=KEYS)
    assert client.get("/v1/models", headers=headers).status_code == 200
    assert client.post(CHAT, content=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer key-on"},
        {"authorization": "key-one"},
        {"x-api-key": ""},
        {"authorization": "Bearer "},
        {"authorization": "Bearer wrong", "x-api-key": "wrong"},
    ],
)
def test_without_a_key_nothing_but_health_is_open(engine: FakeEngine, headers: dict[str, str]) -> None:
    client = client_of(engine, api_keys=KEYS)
    for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/nowhere")):
        answer = client.request(method, path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert client.get("/health", headers=headers).status_code == 200
    assert client.head("/", headers=headers).status_code == 200
    assert engine.requests == []


@pytest.mark.parametrize(
    ("headers", "what"),
    [
        ({}, "This server needs an API key, and none was sent"),
        ({"authorization": "Bearer "}, "This server needs an API key, and none was sent"),
        ({"authorization": "Bearer", "x-api-key": ""}, "This server needs an API key, and none was sent"),
        ({"authorization": "key-one"}, "This server needs an API key, and none was sent"),
        ({"x-api-key": "x"}, "Incorrect API key provided"),
        ({"authorization": "Bearer x", "x-api-key": ""}, "Incorrect API key provided"),
    ],
)
def test_a_missing_key_is_not_called_incorrect(engine: FakeEngine, headers: dict[str, str], what: str) -> None:
    said = client_of(engine, api_keys=KEYS).get("/v1/models", headers=headers).json()["error"]["message"]
    assert said.startswith(f"{what}. Send it as 'Authorization: Bearer")


def test_without_keys_everything_is_open(engine: FakeEngine) -> None:
    assert client_of(engine).get("/v1/models", headers={"authorization": "Bearer whatever"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "settings", "allowed"),
    [
        ("localhost:8000", {}, True),
        ("127.0.0.1:8000", {}, True),
        ("127.1.2.3", {}, True),
        ("[::1]:8000", {}, True),
        ("app.localhost", {}, True),
        ("LOCALHOST", {}, True),
        ("evil.example", {}, False),
        ("localhost.evil.example", {}, False),
        ("evillocalhost", {}, False),
        ("192.168.1.5", {}, False),
        ("", {}, False),
        ("mac.lan", {"allowed_hosts": ("mac.lan",)}, True),
        ("mac.lan:8000", {"allowed_hosts": ("Mac.LAN",)}, True),
        ("other.lan", {"allowed_hosts": ("mac.lan",)}, False),
        ("192.168.1.5:8000", {"host": "0.0.0.0"}, True),
        ("[fe80::1]:8000", {"host": "::"}, True),
        ("evil.example", {"host": "0.0.0.0"}, False),
        ("mac.lan", {"host": "mac.lan"}, True),
        ("evil.example", {"allowed_hosts": ("*",)}, True),
    ],
)
def test_the_host_header(engine: FakeEngine, host: str, settings: dict[str, object], allowed: bool) -> None:
    answer = client_of(engine, **settings).get("/health", headers={"host": host})
    assert answer.status_code == (200 if allowed else 403)
    if not allowed:
        assert answer.json()["error"]["code"] == "host_not_allowed"


def test_web_pages_cannot_post_without_a_preflight(engine: FakeEngine) -> None:
    client = client_of(engine)
    page = {"origin": "https://evil.example"}
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = client.post(CHAT, content=BODY, headers=page | {"content-type": kind})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert client.post(CHAT, content=BODY, headers=page).status_code == 415
    preflight = client.options(CHAT, headers=page | {"access-control-request-method": "POST"})
    assert preflight.status_code == 405
    answer = client.post(CHAT, content=BODY, headers=page | {"content-type": "application/json; charset=utf-8"})
    assert answer.status_code == 200
    assert not any(name.startswith("access-control") for name in (*preflight.headers, *answer.headers))
    assert len(engine.requests) == 1


def test_pages_of_a_named_origin_may_call(engine: FakeEngine) -> None:
    client = client_of(engine, cors_origins=("https://page.example",), api_keys=("right",))
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    preflight = client.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    private = client.options("/v1/chat/completions", headers=asked | {"access-control-request-private-network": "true"})
    assert private.status_code == 200
    assert private.headers["access-control-allow-private-network"] == "true"
    answer = client.get("/v1/models", headers={"origin": "https://page.example", "authorization": "Bearer right"})
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    refused = client.get("/v1/models", headers={"origin": "https://page.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example"  # or the page can't read why


def test_pages_of_other_origins_may_not(engine: FakeEngine) -> None:
    for client in (client_of(engine), client_of(engine, cors_origins=("https://page.example",))):
        asked = {"origin": "https://other.example", "access-control-request-method": "POST"}
        preflight = client.options("/v1/chat/completions", headers=asked)
        assert preflight.status_code >= 400
        assert "access-control-allow-origin" not in preflight.headers
        asked["access-control-request-private-network"] = "true"
        assert client.options("/v1/chat/completions", headers=asked).status_code >= 400
