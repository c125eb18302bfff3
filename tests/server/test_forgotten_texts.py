"""After `DELETE /v1/specprefill/cache` no object of the process holds a text that a request brought."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from importlib import import_module
from inspect import signature
from pkgutil import walk_packages
from typing import Any
from uuid import uuid4

import pytest
from starlette.testclient import TestClient

import mlx_specprefill
import mlx_specprefill_server
from mlx_specprefill import Engine, EngineConfig
from mlx_specprefill.pair import load_pair
from mlx_specprefill_server.settings.server import Settings
from tests.support.application import app_over
from tests.support.scripted import save_scripted

SECRET = "SECRET"  # stands for a text that occurs nowhere else
SCHEMA = {
    "type": "object",
    "properties": {f"a{SECRET}": {"type": "string", "pattern": f"^{SECRET}[a-z]+$"}, "b": {"pattern": f"({SECRET}"}},
    "required": [f"a{SECRET}"],
}
FUNCTION = {"name": f"f{SECRET}", "description": SECRET, "parameters": SCHEMA}
ASKED = {"messages": [{"role": "user", "content": f"Hi {SECRET}"}]}
CUSTOM = {"name": f"c{SECRET}", "format": {"type": "grammar", "syntax": "regex", "definition": f"{SECRET}[0-9]+"}}
CHAT, RAW, RESPONSES, MESSAGES = "chat/completions", "completions", "responses", "messages"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**ASKED, "stop": [SECRET], "user": SECRET, "cache_salt": SECRET, "model": SECRET}),
    (CHAT, {**ASKED, "tools": [{"type": "function", "function": FUNCTION}]}),
    (CHAT, {**ASKED, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}),
    (CHAT, {**ASKED, "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]}),
    (CHAT, {**ASKED, "tools": [{"type": "function", "function": FUNCTION, "defer_loading": True}]}),
    (CHAT, {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
    (RAW, {"prompt": SECRET, "grammar": f'start: "{SECRET}"'}),
    (RAW, {"prompt": SECRET, "grammar": f'start: {SECRET}"'}),
    (RAW, {"prompt": SECRET, "structured_outputs": {"regex": f"{SECRET}+"}}),
    (RESPONSES, {"input": SECRET, "instructions": SECRET, "tools": [{"type": "custom", **CUSTOM}]}),
    (MESSAGES, {**ASKED, "system": SECRET, "tools": [{"name": "x", "input_schema": SCHEMA}], "max_tokens": 9}),
]


@pytest.fixture
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    model = str(save_scripted(tmp_path_factory.mktemp("scripted")))
    with (
        Engine(load_pair(model, model), EngineConfig(prefix_cache_bytes=64 << 20)) as engine,
        TestClient(app_over(engine, Settings()), base_url="http://localhost") as client,
    ):
        yield client


def holder_of(secret: str) -> str:
    """Return what holds a text with the secret, of all objects but this test's own; "" if nothing does."""
    gc.collect()
    coded = secret.encode()
    for holder in gc.get_objects():
        for thing in gc.get_referents(holder):
            text: Any = secret if isinstance(thing, str) else coded
            if isinstance(thing, str | bytes | bytearray) and thing is not text and text in thing:
                return f"{type(holder).__name__}: {thing[:60]!r}".replace(secret, SECRET)
    return ""


def test_no_text_of_a_request_is_left(client: TestClient) -> None:
    secret, statuses = uuid4().hex, list[int]()
    for path, body in BODIES:
        sent = json.dumps({"max_tokens": 4} | body).replace(SECRET, secret)
        statuses.append(client.post(f"/v1/{path}", content=sent).status_code)
    del sent
    assert holder_of(secret)
    assert client.delete("/v1/specprefill/cache").status_code == 200
    assert not holder_of(secret)
    assert statuses.count(200) == len(BODIES) - 1


def test_no_function_remembers_its_arguments_but_names_of_our_own() -> None:
    for package in (mlx_specprefill, mlx_specprefill_server):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                import_module(module.name)
    caches = [one for one in gc.get_objects() if isinstance(one, _lru_cache_wrapper)]
    ours = {f"{one.__module__}.{one.__qualname__}": one for one in caches if "specprefill" in one.__module__}
    assert {name for name, one in ours.items() if signature(one).parameters} == {"mlx_specprefill_server.cli._load"}
