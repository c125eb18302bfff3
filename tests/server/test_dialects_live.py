"""All dialects on a real server: SDKs, silence, clients that leave, shutdown."""

from __future__ import annotations

import threading
import time
from typing import Any

import anthropic
import httpx
import openai
import pytest

from mlx_specprefill import Progress
from mlx_specprefill_server.generation import generation

from .canned_answers import named_events
from .fakes import FakeEngine
from .test_live import CHAT, Endpoint, hang, leave, running, wait_for

HI: Any = [{"role": "user", "content": "Hi"}]
CHATS: Endpoint = (CHAT, {"messages": HI})
RESPONSES: Endpoint = ("/v1/responses", {"input": "Hi"})
MESSAGES: Endpoint = ("/v1/messages", {"messages": HI, "max_tokens": 50})
BOTH = pytest.mark.parametrize("endpoint", [RESPONSES, MESSAGES], ids=["responses", "messages"])
ALL = pytest.mark.parametrize("endpoint", [CHATS, RESPONSES, MESSAGES], ids=["chat", "responses", "messages"])
ALIVE = ("event: response.in_progress", "event: ping", ": keep-alive")
ENDS = ("event: response.completed", "event: message_stop", "data: [DONE]")


def streaming(base: str, endpoint: Endpoint) -> Any:
    return httpx.stream("POST", base + endpoint[0], json=endpoint[1] | {"stream": True}, timeout=60)


def test_the_openai_sdk(live: Any, engine: FakeEngine) -> None:
    base, _ = live(api_keys=("k",))
    with openai.OpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as client:
        whole = client.responses.create(model="m", input="Hi", extra_body={"specprefill": True})
        assert whole.output_text == "Hello"
        assert whole.model_extra["specprefill"]["mode"] == "sparse"
        with client.responses.stream(model="m", input="Hi", instructions="Be brief.") as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert "".join(deltas) == final.output_text == "Hello"
        assert final.usage.output_tokens == 6
        assert client.responses.input_tokens.count(model="m", input="Hi").input_tokens == whole.usage.input_tokens
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="m", input="Hi", previous_response_id="resp_1")
        assert caught.value.param == "previous_response_id"
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="m", input="x" * 5000)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").responses.create(model="m", input="Hi")


def test_the_anthropic_sdk(live: Any, engine: FakeEngine) -> None:
    base, _ = live(api_keys=("k",))
    with anthropic.Anthropic(base_url=base, api_key="k", max_retries=0) as client:
        whole = client.messages.create(model="m", max_tokens=50, messages=HI, extra_body={"specprefill": True})
        assert whole.content[0].text == "Hello"
        assert whole.model_extra["specprefill"]["mode"] == "sparse"
        with client.messages.stream(model="m", max_tokens=50, messages=HI, system="Be brief.") as stream:
            assert "".join(stream.text_stream) == "Hello"
            final = stream.get_final_message()
        assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 6)
        events = list(client.messages.create(model="m", max_tokens=50, messages=HI, stream=True))
        (delta,) = [event for event in events if event.type == "message_delta"]
        assert delta.model_extra["specprefill"]["mode"] == "full"
        with client.beta.messages.stream(model="m", max_tokens=50, messages=HI) as beta:
            assert "".join(beta.text_stream) == "Hello"
        counted = client.messages.count_tokens(model="m", messages=HI).input_tokens
        assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum"):
            client.messages.create(model="m", max_tokens=50, messages=[{"role": "user", "content": "x" * 5000}])
        engine.script = lambda request: [*engine.tokens("He", end=False), RuntimeError("boom")]
        with pytest.raises(anthropic.APIStatusError, match="boom"):
            list(client.messages.create(model="m", max_tokens=50, messages=HI, stream=True))
        engine.says("Hello")
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="wrong").messages.create(model="m", max_tokens=50, messages=HI)
    with anthropic.Anthropic(base_url=base, auth_token="k", max_retries=0) as client:
        assert client.messages.create(model="m", max_tokens=50, messages=HI).stop_reason == "end_turn"


@ALL
def test_the_first_events_precede_all_work(base: str, engine: FakeEngine, endpoint: Endpoint) -> None:
    release = hang(engine)
    with streaming(base, endpoint) as answer:
        lines = answer.iter_lines()
        if endpoint is CHATS:
            assert '"role":"assistant"' in next(lines)
        else:
            assert [next(lines) for _ in range(4)][3] in ALIVE
        release.set()
        list(lines)


@ALL
def test_silence_is_filled_while_queued_and_while_working(
    live: Any, engine: FakeEngine, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.1)
    release = threading.Event()

    def script(request: Any) -> Any:
        for done in range(3000):
            if release.is_set():
                break
            time.sleep(0.02)
            yield Progress("prefill", done, 3000)
        yield from engine.tokens("end")

    engine.script = script
    base, _ = live()
    alive = 0
    with streaming(base, endpoint), streaming(base, endpoint) as queued:
        lines = []
        for line in queued.iter_lines():
            lines.append(line)
            alive += line in ALIVE
            if alive == 6:
                release.set()
    assert alive >= 6
    assert set(ENDS) & set(lines[-4:])


@BOTH
def test_silence_is_filled_while_text_is_held_back(
    live: Any, engine: FakeEngine, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still become a call. Each token is news to the server, but not to the client."""
    monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.1)
    held = '<tool_call>\n{"name": "' + 25 * "x"

    def script(request: Any) -> Any:
        for token in engine.tokens(held):
            time.sleep(0.02)
            yield token

    engine.script = script
    base, _ = live()
    tool = {"type": "function", "name": "read", "parameters": {}}
    if endpoint is MESSAGES:
        tool = {"name": "read", "input_schema": {}}
    answer = httpx.post(base + endpoint[0], json=endpoint[1] | {"stream": True, "tools": [tool]}, timeout=60)
    kinds = [payload["type"] for payload in named_events(answer.text)]
    assert kinds.count("response.in_progress") + kinds.count("ping") >= 2  # one of them comes first
    assert "xxxxxx" in answer.text


@BOTH
def test_a_failed_stream_ends_at_once(base: str, engine: FakeEngine, endpoint: Endpoint) -> None:
    engine.script = lambda request: [RuntimeError("boom")]
    started = time.monotonic()
    with streaming(base, endpoint) as answer:
        payloads = named_events("\n".join(answer.iter_lines()) + "\n")
    assert payloads[-1]["type"] in ("response.failed", "error")
    assert time.monotonic() - started < 30


@ALL
@pytest.mark.parametrize("streamed", [True, False])
def test_running_work_stops_when_its_client_leaves(
    base: str, engine: FakeEngine, endpoint: Endpoint, streamed: bool
) -> None:
    hang(engine, "a")
    leave(base, endpoint, streamed, lambda: engine.health().running == 1)
    wait_for(lambda: running(base) == (0, 0))
    assert engine.reasons == ["cancelled"]


@BOTH
def test_prefill_stops_when_its_client_leaves(base: str, engine: FakeEngine, endpoint: Endpoint) -> None:
    def script(request: Any) -> Any:
        for done in range(10_000):
            time.sleep(0.01)
            yield Progress("prefill", done, 10_000)

    engine.script = script
    with streaming(base, endpoint) as answer:
        lines = answer.iter_lines()
        next(lines)
        wait_for(lambda: running(base) == (1, 0))
    wait_for(lambda: running(base) == (0, 0))
    assert engine.reasons == ["cancelled"]


@ALL
def test_queued_work_is_not_run_when_its_client_leaves(base: str, engine: FakeEngine, endpoint: Endpoint) -> None:
    release = hang(engine, "a")
    with streaming(base, endpoint) as first:
        lines = first.iter_lines()
        next(lines)
        for sent, streamed in enumerate((True, False), 2):
            leave(base, endpoint, streamed, lambda sent=sent: len(engine.handles) == sent)
        wait_for(lambda: [handle.cancelled.is_set() for handle in engine.handles] == [False, True, True])
        release.set()
        list(lines)
    wait_for(lambda: running(base) == (0, 0))
    assert engine.reasons == ["stop", "cancelled", "cancelled"]


@BOTH
def test_shutdown_ends_streams_properly(live: Any, engine: FakeEngine, endpoint: Endpoint) -> None:
    hang(engine, "a")
    base, server = live()
    with streaming(base, endpoint) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        wait_for(lambda: running(base) == (1, 0))
        server.should_exit = True
        payloads = named_events("\n".join([first, *lines]) + "\n")
    if endpoint is RESPONSES:
        assert payloads[-1]["type"] == "response.failed"
        assert payloads[-1]["response"]["error"]["code"] == "server_error"
    else:
        assert payloads[-1]["error"]["type"] == "overloaded_error"
