"""deploy/haproxy.cfg in front of two real servers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.distributed.ranks import free_ports
from tests.support.serving import Server, start_named
from tests.support.waiting import eventually

pytestmark = pytest.mark.extended

CONFIG = Path(__file__).parents[2] / "deploy" / "haproxy.cfg"
PROGRAM = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
SYSTEM = "You know where things are kept."


@pytest.fixture(scope="module")
def program() -> str:
    if PROGRAM is None and os.environ.get("MLX_SPECPREFILL_HAPROXY") == "required":
        pytest.fail("haproxy is not installed")
    if PROGRAM is None:
        pytest.skip("haproxy is not installed")
    return PROGRAM


@contextmanager
def proxied(program: str, folder: Path, servers: list[Server]) -> Iterator[str]:
    """The address of a proxy in front of these servers, once it has found them healthy."""
    listen = f"127.0.0.1:{free_ports(2)}"
    addresses = {f"REPLICA_{i}": server.base.removeprefix("http://") for i, server in enumerate(servers, 1)}
    with (folder / "haproxy.log").open("wb") as log:
        process = subprocess.Popen(
            [program, "-db", "-f", str(CONFIG)],
            env={**os.environ, "LISTEN": listen, **addresses},
            stdout=log,
            stderr=log,
        )
    try:
        assert eventually(lambda: _answers(f"http://{listen}/health")), (folder / "haproxy.log").read_text()
        yield f"http://{listen}"
    finally:
        process.terminate()
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def messages(name: str, turns: int = 1) -> list[dict[str, str]]:
    """A conversation that begins as all the others do."""
    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Where is box {name}?"}]
    for turn in range(1, turns):
        said += [{"role": "assistant", "content": f"In room {turn}."}, {"role": "user", "content": f"And lid {turn}?"}]
    return said


def asked(base: str, said: list[dict[str, str]], key: str = "mine", **more: Any) -> tuple[int, str]:
    """Status and replica of a request."""
    body = {"messages": said, "max_tokens": 2, **more}
    answer = httpx.post(
        f"{base}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=120
    )
    return answer.status_code, answer.headers.get("x-replica", "")


@pytest.mark.nightly
def test_conversations_stay_and_move_on_when_their_replica_shuts_down(program: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        logs = [tmp_path / name for name in ("one", "two")]
        for log in logs:
            log.mkdir()
        servers = [stack.enter_context(start_named(log / "log", "demo")) for log in logs]
        base = stack.enter_context(proxied(program, tmp_path, servers))
        first = [asked(base, messages(str(i))) for i in range(8)]
        later = [asked(base, messages(str(i), turns=3)) for i in reversed(range(8))]  # not taking turns as before
        assert later == first[::-1]
        assert {status for status, _ in first} == {200}
        assert {replica for _, replica in first} == {"one", "two"}
        keys = {asked(base, messages("0"), key=f"key {i}")[1] for i in range(8)}
        assert keys == {"one", "two"}  # another key, another conversation
        _shut_down_under_a_stream(base, servers[int(first[0][1] == "two")], first[0][1])


def _shut_down_under_a_stream(base: str, server: Server, replica: str) -> None:
    """The replica finishes its running answer. The conversation's next request goes to another replica."""
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {"messages": messages("0"), "max_tokens": 300, "ignore_eos": True, "stream": True}
        headers = {"authorization": "Bearer mine"}
        with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, headers=headers, timeout=120) as answer:
            assert answer.headers["x-replica"] == replica
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(120)
    server.process.send_signal(signal.SIGTERM)
    moved = [asked(base, messages("0", turns=2)) for _ in range(3)]
    reader.join(120)
    other = "one" if replica == "two" else "two"
    assert moved == [(200, other)] * 3
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in "".join(lines)
