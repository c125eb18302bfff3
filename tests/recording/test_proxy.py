"""The proxy that writes down what agents ask: everything passes as it comes, keys don't get into the file."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from recording.proxy import LEFT_OUT, Recorder, running

from tests.support.waiting import eventually

KEY = "geheim-471128"
WAIT_S = 60


class Scripted(BaseHTTPRequestHandler):
    """Streams two events, the second one only when `go_on` is set; echoes what it got otherwise."""

    protocol_version = "HTTP/1.1"
    go_on = threading.Event()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path.startswith("/stream"):
            self._stream()
            return
        said = json.dumps({"authorization": self.headers.get("authorization"), "path": self.path}).encode()
        self.send_response(201)
        self.send_header("Content-Length", str(len(said)))
        self.send_header("X-Answer", "yes")
        self.end_headers()
        self.wfile.write(said)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in (b"data: one\n\n", b"data: two\n\n"):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            self.wfile.flush()
            self.go_on.wait(WAIT_S)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The proxy in front of the scripted server."""
    Scripted.go_on.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_address[1]}"
        with running(base, Recorder(tmp_path / "out.jsonl", [KEY])) as proxy:
            yield proxy
        Scripted.go_on.set()
        server.shutdown()


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=WAIT_S, trust_env=False) as client:
        yield client


def written(folder: Path) -> list[dict[str, Any]]:
    file = folder / "out.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_stream_passes_piece_by_piece(address: str, client: httpx.Client, tmp_path: Path) -> None:
    """The first event arrives while the server has not said more."""
    with client.stream("POST", f"{address}/stream", json={"stream": True}) as answer:
        events = answer.iter_lines()
        assert next(events) == "data: one"
        assert not written(tmp_path)
        Scripted.go_on.set()
        assert [line for line in events if line] == ["data: two"]
    assert eventually(lambda: len(written(tmp_path)) == 1)
    (entry,) = written(tmp_path)
    assert 0 <= entry["first_s"] <= entry["total_s"]
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/stream", 200)
    assert entry["body"] == {"stream": True}


def test_the_server_gets_the_key_and_the_file_does_not(address: str, client: httpx.Client, tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "X-Api-Key": KEY, "Cookie": "a=b", "X-Session": "s1"}
    body = {"messages": [{"role": "user", "content": f"my key is {KEY}"}]}
    answer = client.post(f"{address}/v1/messages?beta=true&key={KEY}", json=body, headers=headers)
    assert answer.status_code == 201
    assert answer.headers["x-answer"] == "yes"
    assert answer.json() == {"authorization": f"Bearer {KEY}", "path": f"/v1/messages?beta=true&key={KEY}"}
    assert eventually(lambda: len(written(tmp_path)) == 1)
    assert KEY not in (tmp_path / "out.jsonl").read_text()
    (entry,) = written(tmp_path)
    assert {entry["headers"][name] for name in ("authorization", "x-api-key", "cookie")} == {LEFT_OUT}
    assert entry["headers"]["x-session"] == "s1"
    assert entry["query"] == {"beta": "true", "key": LEFT_OUT}
    assert entry["body"]["messages"][0]["content"] == f"my key is {LEFT_OUT}"


@pytest.mark.parametrize(
    ("content", "encoding", "expected"),
    [
        (b'{"a": 1}', "", {"a": 1}),
        (gzip.compress(b'{"a": 1}'), "gzip", {"a": 1}),
        (b"plain", "", "plain"),
        (b"\xff\xfe", "", "\ufffd\ufffd"),
        (b"not gzip", "gzip", "not gzip"),
    ],
    ids=["json", "gzip", "text", "binary", "not gzip"],
)
def test_bodies_are_written_as_what_they_are(
    address: str, client: httpx.Client, tmp_path: Path, content: bytes, encoding: str, expected: Any
) -> None:
    client.post(f"{address}/x", content=content, headers={"content-encoding": encoding} if encoding else {})
    assert eventually(lambda: len(written(tmp_path)) == 1)
    assert written(tmp_path)[0]["body"] == expected


def test_a_client_that_leaves_is_written_down(address: str, client: httpx.Client, tmp_path: Path) -> None:
    with client.stream("POST", f"{address}/stream", json={}) as answer:
        assert next(answer.iter_lines()) == "data: one"
    Scripted.go_on.set()
    assert eventually(lambda: len(written(tmp_path)) == 1)


def test_a_server_that_is_not_there_is_a_502(client: httpx.Client, tmp_path: Path) -> None:
    with running("http://127.0.0.1:9", Recorder(tmp_path / "out.jsonl")) as address:
        assert client.post(f"{address}/v1/x", json={}).status_code == 502
    assert [entry["status"] for entry in written(tmp_path)] == [502]
