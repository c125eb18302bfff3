"""A proxy on the loopback interface that passes everything on unchanged and records the requests.

A line per request: time, method, path, query, headers, body, status and the seconds to the first byte and to the end of
the answer. Answers are not written down, and neither is anything that authenticates.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
SECRET = re.compile("auth|key|token|cookie|secret|credential", re.IGNORECASE)  # in a header's or a parameter's name
HOP = {"connection", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "content-length"}
LEFT_OUT = "(left out)"
START_S = 30


class Recorder:
    """A recorder that appends to a file, from any thread.

    Args:
        secrets: texts that never get into the file, wherever they stand.
    """

    def __init__(self, file: Path, secrets: Iterable[str] = ()) -> None:
        self._file = file
        self._secrets = [json.dumps(one)[1:-1] for one in secrets if one]
        self._lock = threading.Lock()

    def add(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry, ensure_ascii=True)
        for secret in self._secrets:
            line = line.replace(secret, LEFT_OUT)
        with self._lock, self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def without_keys(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers or parameters without the values of those that may authenticate."""
    return {name: LEFT_OUT if SECRET.search(name) else value for name, value in pairs}


def body_of(content: bytes, encoding: str) -> Any:
    """Return a body as JSON, else as text."""
    if encoding == "gzip":
        with suppress(OSError):
            content = gzip.decompress(content)
    text = content.decode(errors="replace")
    with suppress(json.JSONDecodeError):
        return json.loads(text)
    return text


class _Passing:
    """A handler that passes every request on to the server.

    Args:
        base: the server's address without a path.
    """

    def __init__(self, base: str, recorder: Recorder) -> None:
        self._base = base.rstrip("/")
        self._recorder = recorder
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10), trust_env=False)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self._client:
            yield

    async def handle(self, request: Request) -> Response:
        begun, content = time.time(), await request.body()
        query = f"?{request.url.query}" if request.url.query else ""
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP]
        entry = {
            "time": begun,
            "method": request.method,
            "path": request.url.path,
            "query": without_keys(request.query_params.items()),
            "headers": without_keys(request.headers.items()),
            "body": body_of(content, request.headers.get("content-encoding", "")),
        }
        asked = self._client.build_request(
            request.method, f"{self._base}{request.url.path}{query}", headers=headers, content=content
        )
        try:
            answer = await self._client.send(asked, stream=True)
        except httpx.HTTPError as error:
            self._recorder.add(entry | {"status": 502})
            return Response(f"{self._base} does not answer: {error}", 502)
        kept = {name: value for name, value in answer.headers.items() if name not in HOP}
        return StreamingResponse(self._passed(answer, entry), answer.status_code, kept)

    async def _passed(self, answer: httpx.Response, entry: dict[str, Any]) -> AsyncIterator[bytes]:
        """Pass each piece on as it comes. Record the request when all has come or the client has gone."""
        first = None
        try:
            async for piece in answer.aiter_raw():
                first = first or time.time()
                yield piece
        finally:
            now, begun = time.time(), entry["time"]
            times = {"first_s": None if first is None else first - begun, "total_s": now - begun}
            self._recorder.add(entry | {"status": answer.status_code} | times)
            await answer.aclose()


@contextmanager
def running(base: str, recorder: Recorder) -> Iterator[str]:
    """Yield the proxy's own address until the block ends.

    Raises:
        TimeoutError: it did not start.
    """
    passing = _Passing(base, recorder)
    route = Route("/{path:path}", passing.handle, methods=METHODS)
    app = Starlette(routes=[route], lifespan=passing.lifespan)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + START_S
    while not server.started:
        if time.monotonic() > until or not thread.is_alive():
            raise TimeoutError("the proxy did not start")
        time.sleep(0.02)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(START_S)
