"""The key of a request decides which cached prompts it shares and which requests it sees."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient

from mlx_specprefill import CacheLabel, Engine, EngineConfig
from mlx_specprefill_server.http.auth import Identity, identities_by_key
from mlx_specprefill_server.settings.server import Settings
from tests.support.application import app_over
from tests.support.tiny import random_prompt, tiny_pair

from .conftest import client_of
from .fakes import FakeEngine

STATS, CACHE = "/v1/specprefill/stats", "/v1/specprefill/cache"
HI: Any = [{"role": "user", "content": "Hi"}]
ENDPOINTS: dict[str, Any] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
    "/v1/specprefill/explain": {"messages": HI},
}
EVERYWHERE = pytest.mark.parametrize("path", ENDPOINTS)
KEYS = ("key-ann", "key-bob")
SECRET = random_prompt(600)


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-{name}"}


def label_of(client: TestClient, engine: FakeEngine, path: str, who: str | None = None, **fields: Any) -> CacheLabel:
    answer = client.post(path, json=ENDPOINTS[path] | fields, headers=key(who) if who else {})
    assert answer.status_code == 200, answer.text
    return engine.requests[-1].label


@EVERYWHERE
def test_several_keys_are_several_labels(engine: FakeEngine, path: str) -> None:
    client = client_of(engine, api_keys=KEYS, admin_keys=("key-eve",))
    labels = [label_of(client, engine, path, who) for who in ("ann", "bob", "eve")]
    assert len(set(labels)) == 3
    assert CacheLabel() not in labels
    assert label_of(client, engine, path, "ann") == labels[0]
    assert not any("key" in label.owner for label in labels)


@EVERYWHERE
def test_a_salt_narrows_further(engine: FakeEngine, path: str) -> None:
    client = client_of(engine, api_keys=KEYS)
    plain = label_of(client, engine, path, "ann")
    salts = [label_of(client, engine, path, who, cache_salt=salt) for who in ("ann", "bob") for salt in ("x", "y")]
    assert len({plain, *salts}) == 5
    assert salts[0].owner == plain.owner
    assert label_of(client, engine, path, "ann", cache_salt="x") == salts[0]
    assert label_of(client, engine, path, "ann", cache_salt=None) == plain
    assert salts[0].salt not in ("x", salts[2].salt)


@EVERYWHERE
@pytest.mark.parametrize("settings", [{}, {"api_keys": ("key-ann",)}], ids=str)
def test_without_several_keys_all_share(engine: FakeEngine, path: str, settings: dict[str, Any]) -> None:
    client = client_of(engine, **settings)
    assert label_of(client, engine, path, "ann") == CacheLabel()
    salted = label_of(client, engine, path, "ann", cache_salt="x")
    assert (salted.owner, bool(salted.salt)) == ("", True)


@EVERYWHERE
@pytest.mark.parametrize("salt", ["", 5, ["x"]])
def test_a_salt_is_a_text_that_is_not_empty(engine: FakeEngine, path: str, salt: Any) -> None:
    answer = client_of(engine).post(path, json=ENDPOINTS[path] | {"cache_salt": salt})
    assert answer.status_code == 400
    assert "cache_salt" in answer.json()["error"]["message"]
    assert engine.requests == []


def test_every_answer_of_a_request_has_the_label(engine: FakeEngine) -> None:
    client = client_of(engine, api_keys=KEYS)
    body = {"prompt": ["a", "b"], "n": 2}
    assert client.post("/v1/completions", json=body, headers=key("ann")).status_code == 200
    assert len(engine.requests) == 4
    assert len({request.label for request in engine.requests}) == 1


def test_names_are_the_same_after_a_restart_and_no_plain_hash() -> None:
    first, again = (identities_by_key(Settings(api_keys=tuple(map(SecretStr, KEYS)))) for _ in range(2))
    assert first == again
    assert identities_by_key(Settings(api_keys=(SecretStr("key-ann"), SecretStr("key-ann")))) == {
        b"key-ann": Identity()
    }


def test_an_admin_key_opens_the_server(engine: FakeEngine) -> None:
    client = client_of(engine, admin_keys=("key-eve",))
    assert client.get("/v1/models").status_code == 401
    assert client.get("/v1/models", headers=key("eve")).status_code == 200


def test_a_key_sees_its_own_answers_only(engine: FakeEngine) -> None:
    client = client_of(engine, api_keys=KEYS, admin_keys=("key-eve",))
    for who, count in (("ann", 3), ("bob", 60), ("eve", 1)):
        for _ in range(count):
            client.post("/v1/completions", json={"prompt": "Hi"}, headers=key(who) | {"x-request-id": f"{who}"})

    def seen(who: str) -> list[str]:
        return [answer["request_id"] for answer in client.get(STATS, headers=key(who)).json()["recent"]]

    assert seen("ann") == ["ann"] * 3  # however much the others ask
    assert seen("bob") == ["bob"] * 50
    assert seen("eve") == ["eve"] + ["bob"] * 49


def test_forgetting_drops_the_last_answers_of_the_key_and_of_what_it_asked_before(engine: FakeEngine) -> None:
    """Their reports show what stood around a difference. One that runs meanwhile is not listed either."""
    client = client_of(engine, api_keys=KEYS, admin_keys=("key-eve",))
    state: Any = client.app.state.models.state  # type: ignore[attr-defined]

    def ask(who: str) -> None:
        client.post("/v1/completions", json={"prompt": "Hi"}, headers=key(who))

    def seen(who: str) -> int:
        return len(client.get(STATS, headers=key(who)).json()["recent"])

    for who in ("ann", "bob", "eve"):
        ask(who)
    before = time.monotonic()
    assert client.delete(CACHE, headers=key("ann")).status_code == 200
    assert (seen("ann"), seen("bob"), seen("eve")) == (0, 1, 2)
    ann, bob = (identity.name for identity in identities_by_key(Settings(api_keys=KEYS)).values())
    for name in (ann, bob):
        state.recent.add(name, {}, before)
    assert (seen("ann"), seen("bob"), seen("eve")) == (0, 2, 3)
    ask("ann")
    assert seen("ann") == 1
    assert client.delete(CACHE, headers=key("eve")).status_code == 200
    assert (seen("ann"), seen("bob"), seen("eve")) == (0, 0, 0)


# --- with an engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Iterator[Engine]:
    with Engine(tiny_pair(), EngineConfig(prefix_cache_bytes=64 << 20, prefill_step=64)) as engine:
        yield engine


@pytest.fixture
def clean(real: Engine) -> Engine:
    real.drop_cached()
    return real


def client_to(engine: Engine, **settings: Any) -> TestClient:
    return TestClient(app_over(engine, Settings(**settings)), base_url="http://localhost")


def cached_tokens(client: TestClient, who: str, prompt: Any, **fields: Any) -> int:
    body = {"prompt": list(prompt), "max_tokens": 2, "specprefill": False, **fields}
    answer = client.post("/v1/completions", json=body, headers=key(who))
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(usage, int)
    return usage


def test_a_key_lists_and_drops_its_own_alone(clean: Engine) -> None:
    client = client_to(clean, api_keys=KEYS, admin_keys=("key-eve",))

    def listed(who: str) -> set[str]:
        return {entry["id"] for entry in client.get(CACHE, headers=key(who)).json()["data"]}

    for who in ("ann", "bob"):
        cached_tokens(client, who, SECRET)
        cached_tokens(client, who, SECRET, cache_salt="x")
    ann, bob = listed("ann"), listed("bob")
    assert (len(ann), len(bob), ann & bob) == (2, 2, set())
    assert listed("eve") == ann | bob
    for entry in bob:
        assert client.delete(f"{CACHE}/{entry}", headers=key("ann")).status_code == 404
    assert client.delete(CACHE, headers=key("ann")).status_code == 200
    assert (listed("ann"), listed("eve")) == (set(), bob)
    assert client.delete(f"{CACHE}/{bob.pop()}", headers=key("eve")).status_code == 200
    assert client.delete(CACHE, headers=key("eve")).status_code == 200
    assert listed("bob") == set()


def test_without_keys_everything_is_listed_and_dropped(clean: Engine) -> None:
    cached_tokens(client_to(clean, api_keys=KEYS), "ann", SECRET)
    client = client_to(clean)
    assert len(client.get(CACHE).json()["data"]) == 1
    assert client.delete(CACHE).status_code == 200
    assert clean.cached() == ()
