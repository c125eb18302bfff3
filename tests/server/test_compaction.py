"""An agent compacts its session: five clients' words behind one session, in their dialects, and what follows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specprefill import Engine
from mlx_specprefill.pair import load_pair
from mlx_specprefill_server.settings.server import Settings
from tests.engine.test_everything import COMPACTIONS, CONFIG, MODELS, ONE, TEXT
from tests.support.application import app_over

from .test_history import CHAT, MESSAGES, RESPONSES, ask

SYSTEM = "You are an agent. " + "Read before you write, and say what you have done. " * 8
PATHS = {"Claude Code": MESSAGES, "Codex": RESPONSES}  # the others: chat
UNSEEN = re.compile(r"it has not seen (\d+) tokens")
Talk = list[tuple[str, str]]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with (
        Engine(load_pair(str(MODELS / "demo/target"), str(MODELS / "demo/draft")), CONFIG) as engine,
        TestClient(app_over(engine, Settings()), base_url="http://localhost") as running,
    ):
        yield running


def said(client: TestClient, name: str, talk: Talk, **more: Any) -> tuple[str, dict[str, Any]]:
    """The answer to a conversation in the client's dialect, and its report."""
    path = PATHS.get(name, CHAT)
    turns: list[Any] = [{"role": role, "content": text} for role, text in talk]
    body = {"temperature": 0, "cache_salt": name, **more}
    if path == RESPONSES:
        answer = ask(client, path, {"instructions": SYSTEM, "input": turns, "max_output_tokens": 4, **body})
        return answer["output"][0]["content"][0]["text"], answer["specprefill"]
    if path == MESSAGES:
        answer = ask(client, path, {"system": SYSTEM, "messages": turns, "max_tokens": 4, **body})
        return answer["content"][0]["text"], answer["specprefill"]
    turns = [{"role": "system", "content": SYSTEM}, *turns]
    answer = ask(client, path, {"messages": turns, "max_tokens": 4, **body})
    return answer["choices"][0]["message"]["content"], answer["specprefill"]


def compacted(client: TestClient, name: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The reports of a session's last turn, of the request for its summary, and of the first turn behind that."""
    talk, last = list[tuple[str, str]](), dict[str, Any]()
    for question in (f"{TEXT}\n\n{ONE}", "And then?", f"This is the next page. {TEXT}\n\nWhom did the ship meet?"):
        text, last = said(client, name, [*talk, ("user", question)], **more)
        talk += [("user", question), ("assistant", text)]
    summary, asked = said(client, name, [*talk, ("user", COMPACTIONS[name])], **more)
    _, behind = said(client, name, [("user", f"The session so far: {summary}. Go on.")], **more)
    return last, asked, behind


@pytest.mark.parametrize("sparse", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_five_clients_are_treated_alike(client: TestClient, sparse: bool) -> None:
    found = set()
    for name in COMPACTIONS:
        more = {} if sparse else {"specprefill": False, "cache_salt": f"{name} in full"}
        last, asked, behind = compacted(client, name, **more)
        left_out = last["prompt_tokens"] - last["kept_tokens"]
        assert (left_out > 0) == sparse
        assert asked["cached_tokens"] >= last["kept_tokens"]
        absent = asked["prompt_tokens"] - asked["kept_tokens"]
        assert absent <= left_out  # what the session has read, and all behind it
        unseen = UNSEEN.search(asked["reason"])
        assert (unseen is not None) == sparse
        assert unseen is None or absent <= int(unseen[1]) <= left_out
        system = behind["prompt_tokens"] - behind["cached_tokens"]
        assert (behind["mode"], system < 60) == ("full", True)  # system prompt and tools are there already
        found.add((asked["mode"], asked["cached_tokens"], unseen and unseen[1], behind["cached_tokens"]))
    assert len(found) == 1
