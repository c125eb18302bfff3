"""Every method at every kind of target, over real sockets: an answer below 500, and the server lives on."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS TRACE CONNECT PROPFIND PURGE M-SEARCH".split()
TARGETS = (
    "*", "/", "//", "///", "/v1", "/v1/", "/v1//models", "/models/", "/v1/models", "/v1/models/a%2Fb", "/v1/models/%00",
    "/v1/models/%ff%fe", "/v1/models/..%2f..", "/web/..%2fapp.py", "/web/", "/../etc/passwd", "/health?", "/health#x",
    "/v1/specprefill/cache/%2e%2e", "/v1/specprefill/stats?model=%ff", "/v1/specprefill/verdicts/%0d%0a",
    "/v1/chat/completions", "/v1/specprefill/explain?x=[", "http://localhost/v1/models", "http://other/health",
    "localhost:80", "http://[::1", "health", "?", "/" + "a" * 4000, "/%", "/%zz", "/;x=1", "/v1/models?" + "&" * 500,
)  # fmt: skip


def status(base: str, request: bytes) -> int | None:
    """The answer's status, None where the connection ends without one."""
    parts = urlsplit(base)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        connection.sendall(request)
        line = connection.makefile("rb").readline()
    return int(line.split()[1]) if line else None


@pytest.mark.parametrize("keyed", [False, True])
def test_no_method_at_any_target_is_a_failure(live: Callable[..., Any], keyed: bool) -> None:
    base, _ = live(api_keys=("right",) if keyed else (), cors_origins=("http://page",) if keyed else ())
    for method in METHODS:
        for target in TARGETS:
            head = f"{method} {target} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            got = status(base, head.encode())
            assert got is not None, (method, target)
            assert got < 500, (method, target)
    assert httpx.get(f"{base}/health").status_code == 200


@pytest.mark.parametrize(
    "line",
    [
        "host: \xff", "host: [", "host: [::1", "host: :80", "authorization: Bearer", "authorization: \xe9\xff",
        "x-api-key: \xff", "x-request-timeout: nan", "x-request-timeout: \xb2", "content-encoding: gzip",
        "x-request-id: \xff", "origin: null", "content-type: \xff", "traceparent: x", "expect: 100-continue",
        "access-control-request-method: *", "transfer-encoding: chunked",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
def test_no_header_is_a_failure(live: Callable[..., Any], method: str, line: str) -> None:
    base, _ = live(api_keys=("right",))
    host = "" if line.startswith("host") else "host: localhost\r\n"
    for key in ("", "authorization: Bearer right\r\n"):
        body = "0\r\n\r\n" if line.startswith("transfer") else ""
        length = "" if body else "content-length: 0\r\n"
        head = f"{method} /v1/chat/completions HTTP/1.1\r\n{host}{key}{length}connection: close\r\n{line}\r\n\r\n{body}"
        got = status(base, head.encode("latin-1"))
        assert got is not None
        assert got < 500
