"""A stand-in for Hugging Face's hub: the requests that huggingface_hub and `pull` make of it, on 127.0.0.1.

Files of at least `LARGE` bytes are kept apart, as the hub keeps those of Git LFS: their addresses redirect to a second
server, which must not see the user's token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

__all__ = ["COMMIT", "Hub", "hub_of", "used_by_this_process"]

COMMIT = "1234567890" * 4
LARGE = 8192  # bytes
_REPOSITORY = r"(?P<id>[^/]+/[^/]+)"


@dataclass
class Hub:
    """A hub with repositories, settable misbehaviour, and a record of its requests.

    Attributes:
        repositories: id -> file name -> content.
        refused: id -> status and code of the answer to everything about it; `withheld`: only to its files.
        token: which every request about a gated repository has to carry; None: nothing is asked for.
        cut: bytes of a large file after which its connection is closed; `cuts`: how often.
        stalled: bytes after which a large file's answer waits for `released`.
        commit: of every repository's main branch.
        sent: file name -> bytes of its content that were sent, ranges of any length together.
        asked: method, path and headers of each request to the hub; `asked_apart`: of those for large files.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    withheld: dict[str, tuple[int, str]] = field(default_factory=dict)
    token: str | None = None
    cut: int | None = None
    cuts: int = 0
    stalled: int | None = None
    commit: str = COMMIT
    sent: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    asked_apart: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    url_apart: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, folder: Path) -> None:
        self.repositories[name] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def variables(self, home: Path) -> dict[str, str]:
        """Return the variables with which another process uses this hub."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}


@contextmanager
def hub_of() -> Iterator[Hub]:
    """An empty one that runs until the block ends."""
    hub = Hub()
    apart = ThreadingHTTPServer(("127.0.0.1", 0), type("Apart", (_Apart,), {"hub": hub}))
    front = ThreadingHTTPServer(("127.0.0.1", 0), type("Front", (_Front,), {"hub": hub}))
    hub.url, hub.url_apart = (f"http://127.0.0.1:{server.server_port}" for server in (front, apart))
    for server in (front, apart):
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield hub
    finally:
        hub.released.set()
        for server in (front, apart):
            server.shutdown()
            server.server_close()


def used_by_this_process(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the constants that huggingface_hub reads from the variables at import. Return its cache folder."""
    cache = home / "hub"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return cache


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *arguments: Any) -> None:
        """Silent."""

    def answer(self, status: int, body: bytes = b"", /, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def part(self, name: str, content: bytes, **headers: str) -> None:
        """The range that is asked for, as far as the faults of today let it come."""
        begin, end = self.range(len(content))
        whole = begin is None
        piece = content[begin or 0 : end]
        said = {"Content-Length": str(len(piece)), **headers}
        if not whole:
            said["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self.send_response(200 if whole else 206)
        for key, value in said.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command == "HEAD":
            return
        going = self.limit(len(piece))
        self.write(name, piece[:going])
        if going < len(piece):
            if self.hub.stalled is not None:
                self.hub.released.wait(120)
            self.close_connection = True

    def range(self, size: int) -> tuple[int | None, int]:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return None, size
        return int(asked[1]), min(size, int(asked[2]) + 1 if asked[2] else size)

    def limit(self, size: int) -> int:
        return size

    def write(self, name: str, piece: bytes) -> None:
        with self.hub.lock:
            self.hub.sent[name] = self.hub.sent.get(name, 0) + len(piece)
        self.wfile.write(piece)
        self.wfile.flush()


class _Apart(_Handler):
    """Large files by their SHA-256."""

    def do_GET(self) -> None:
        hub = self.hub
        with hub.lock:
            hub.asked_apart.append((self.command, self.path, dict(self.headers)))
        found = {_sha256(body): (name, body) for files in hub.repositories.values() for name, body in files.items()}
        name, body = found[self.path.removeprefix("/")]
        self.part(name, body)

    def limit(self, size: int) -> int:
        hub = self.hub
        if hub.stalled is not None and not hub.released.is_set():
            return min(size, hub.stalled)
        with hub.lock:
            if hub.cut is None or hub.cuts == 0:
                return size
            hub.cuts -= 1
            return min(size, hub.cut)


class _Front(_Handler):
    """The hub itself."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.asked.append((self.command, path, dict(self.headers)))
        for pattern, reply in (
            (rf"/api/models/{_REPOSITORY}(/revision/[^/]+)?", self.about),
            (rf"/api/models/{_REPOSITORY}/tree/[^/]+", self.tree),
            (rf"/{_REPOSITORY}/resolve/[^/]+/(?P<file>.+)", self.resolve),
        ):
            if (found := re.fullmatch(pattern, path)) is not None:
                if not self.refuse(found["id"]):
                    reply(found)
                return
        self.answer(404)

    def refuse(self, repository: str) -> bool:
        if repository in self.hub.refused:
            status, code = self.hub.refused[repository]
            self.answer(status, X_Error_Code=code, X_Error_Message="no")
        elif self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.answer(401, X_Error_Code="GatedRepo", X_Error_Message="no")
        elif repository not in self.hub.repositories:
            self.answer(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        else:
            return False
        return True

    def about(self, found: re.Match[str]) -> None:
        files = self.hub.repositories[found["id"]].items()
        siblings = [{"rfilename": name, "size": len(body), "blobId": _sha1(body), **_lfs(body)} for name, body in files]
        self.json({"id": found["id"], "sha": self.hub.commit, "siblings": siblings})

    def tree(self, found: re.Match[str]) -> None:
        files = self.hub.repositories[found["id"]].items()
        entries = [
            {"type": "file", "path": name, "size": len(body), "oid": _sha1(body), **_lfs(body, "oid")}
            for name, body in files
        ]
        self.json(entries)

    def json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def resolve(self, found: re.Match[str]) -> None:
        if found["id"] in self.hub.withheld:
            status, code = self.hub.withheld[found["id"]]
            self.answer(status, X_Error_Code=code, X_Error_Message="no")
            return
        body = self.hub.repositories[found["id"]].get(found["file"])
        said = {"X_Repo_Commit": self.hub.commit}
        if body is None:
            self.answer(404, X_Error_Code="EntryNotFound", **said)
        elif len(body) < LARGE:
            self.part(found["file"], body, ETag=f'"{_sha1(body)}"', **said)
        else:
            digest = _sha256(body)
            where = {"Location": f"{self.hub.url_apart}/{digest}", "X_Linked_Size": str(len(body))}
            self.answer(302, X_Linked_ETag=f'"{digest}"', **where, **said)


def _lfs(body: bytes, digest: str = "sha256") -> dict[str, Any]:
    if len(body) < LARGE:
        return {}
    return {"lfs": {digest: _sha256(body), "size": len(body), "pointerSize": 134}}
