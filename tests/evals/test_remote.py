"""A server as the model under test: a scripted one that answers well, badly, or not at all."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mlx_specprefill_evals.arms import FULL, arms
from mlx_specprefill_evals.errors import NotMeasuredError, UnreachableError
from mlx_specprefill_evals.facts import Turn
from mlx_specprefill_evals.remote import RemoteModel
from mlx_specprefill_evals.tasks import GROUPS, TASKS, Item, Space, make_item

ITEM = Item((Turn("First?", "One."), Turn("Second?", "Two.")), ("two",))


class Answering(ThreadingHTTPServer):
    answer: Any

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.bodies: list[Any] = []


class Handler(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self):
        self.respond(200, {"data": [{"id": "tiny"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append((body, self.headers.get("authorization")))
        self.respond(*self.server.answer(body))

    def respond(self, status, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def serving(answer):
    server = Answering(("127.0.0.1", 0), Handler)
    server.answer = answer
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def good(body):
    said = body["messages"][-1]["content"]
    report = {"kept_tokens": 25, "prompt_tokens": 100} if body.get("specprefill") else None
    return 200, {
        "choices": [{"message": {"content": f"<think>hm</think>answer to {said}"}}],
        "usage": {"prompt_tokens": 1000},
        "specprefill": report,
    }


def test_turns_follow_each_other_and_arms_send_their_fields():
    with serving(good) as (server, url):
        tested = RemoteModel(f"{url}/v1/", api_key="secret")
        replies = tested.ask(ITEM, arms(["sparse"], ["0.25"]), 9, 0)
    bodies = [body for body, _ in server.bodies[1:]]
    assert {key for _, key in server.bodies} == {"Bearer secret"}
    assert {arm.name: (reply.text, reply.kept) for arm, reply in replies.items()} == {
        "full": ("answer to Second?", None),
        "sparse@0.25": ("answer to Second?", 0.25),
    }
    assert [body["specprefill"] for body in bodies] == [False, False, True, True]
    assert [body.get("specprefill_keep_pct") for body in bodies] == [None, None, 0.25, 0.25]
    assert [message["role"] for message in bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert (bodies[0]["model"], bodies[0]["max_tokens"], bodies[0]["temperature"]) == ("tiny", 9, 0)
    asked = len(server.bodies[0][0]["messages"][0]["content"])  # 1000 tokens by the server's count
    assert tested.count("x" * asked) == 1000


def test_a_system_message_comes_first():
    with serving(good) as (server, url):
        RemoteModel(url).ask(replace(ITEM, system="Be brief."), [FULL], 9, 0)
    for body, _ in server.bodies[1:]:
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert body["messages"][1]["role"] == "user"


def test_no_arm_finds_what_another_left_in_the_cache():
    with serving(good) as (server, url):
        RemoteModel(url).ask(ITEM, arms(["sparse", "served"], ["0.25", "0.5"]), 9, 0)
    salts = [body["cache_salt"] for body, _ in server.bodies[1:]]
    assert salts == ["full"] * 2 + ["sparse@0.25"] * 2 + ["sparse@0.5"] * 2 + ["served"] * 2


def test_answers_are_compared_with_those_of_a_full_prefill():
    def other(body):
        status, reply = good(body)
        if body.get("specprefill_keep_pct") == 0.25:
            reply["choices"][0]["message"]["content"] = "something else"
        return status, reply

    with serving(other) as (_, url):
        replies = RemoteModel(url).ask(ITEM, arms(["sparse"], ["0.25", "0.5"]), 9, 0)
    assert [reply.measures["same"] for reply in replies.values()] == [1.0, 0.0, 1.0]
    assert all(reply.measures["seconds"] > 0 for reply in replies.values())


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((200, b"<html>"), "not JSON"),
        ((200, {"choices": []}), "has no choices"),
        ((503, {"error": {"message": "full up"}}), "503: full up"),
        ((500, b"oops"), "500: oops"),
    ],
)
def test_answers_that_do_not_parse_say_what_is_wrong(reply, message):
    replies = iter([good({"messages": [{"content": ""}]}), reply])
    with serving(lambda body: next(replies)) as (_, url):
        tested = RemoteModel(url)
        with pytest.raises(NotMeasuredError, match=message):
            tested.ask(ITEM, [FULL], 9, 0)


def test_arms_that_need_the_engine_are_refused():
    with serving(good) as (_, url), pytest.raises(NotMeasuredError, match="arm oracle needs the engine"):
        RemoteModel(url).ask(ITEM, arms(["oracle"], ["0.2"]), 9, 0)


def test_a_server_that_is_down_is_unreachable():
    with serving(good) as (_, url):
        pass
    with pytest.raises(UnreachableError, match=r"no answer from http://127\.0\.0\.1"):
        RemoteModel(url)


def test_what_only_distributions_judge_is_not_asked_of_a_server():
    with serving(good) as (_, url), pytest.raises(NotMeasuredError, match="distributions"):
        RemoteModel(url).ask(Item((Turn("First?", "One."),), ()), [FULL], 8, 0)


def test_the_public_suite_can_be_asked_of_a_server():
    made = [make_item(TASKS[name], name, 0, Space(1500, len)) for name in GROUPS["public"]]
    assert all(item.values and not (item.known and item.known.raw) for item in made)
