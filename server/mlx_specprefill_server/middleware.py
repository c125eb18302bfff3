"""HTTP conventions for every path: HEAD works where GET does, a trailing slash or a missing /v1 makes no difference."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .auth import Identity
from .errors import RETRY_AFTER_S, ApiError, error_response
from .service import ServerState
from .settings import Settings

__all__ = ["TIMEOUT_HEADER", "HeadMiddleware", "PathMiddleware", "RequestLimitMiddleware"]

VERSIONED = ("chat", "completions", "messages", "models", "responses")  # of paths that some clients call without /v1
OWN_HEAD = ("/", "/health")  # paths with their own answer to HEAD


class PathMiddleware:
    """Outermost ASGI middleware: `/v1/models/` and `/models` are `/v1/models`, also for authentication and the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].rstrip("/") or "/"
            scope["path"] = f"/v1{path}" if path.split("/")[1] in VERSIONED else path
        await self._app(scope, receive, send)


class HeadMiddleware:
    """Innermost ASGI middleware: HEAD has GET's status and headers, and no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD" or scope["path"] in OWN_HEAD:
            await self._app(scope, receive, send)
            return
        with suppress(_EnoughError):
            await self._app({**scope, "method": "GET"}, receive, _headless(send))


class _EnoughError(Exception):
    """Ends the stream of a HEAD request, whose body is not sent."""


def _headless(send: Send) -> Send:
    async def start_only(message: Message) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        await send({"type": "http.response.body", "body": b""})
        if message.get("more_body", False):
            raise _EnoughError

    return start_only


TIMEOUT_HEADER = "x-request-timeout"  # seconds
RETRY = {"Retry-After": RETRY_AFTER_S}


class RequestLimitMiddleware:
    """ASGI middleware behind AuthMiddleware that limits POST requests. Other requests cost next to nothing."""

    def __init__(self, app: ASGIApp, state: ServerState, settings: Settings) -> None:
        self._app = app
        self._state = state
        self._limit = settings.max_requests_per_key or math.inf
        self._timeout = settings.request_timeout_s or math.inf
        self._running: Counter[Identity] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            self._admit(scope)
        except ApiError as refusal:
            await error_response(refusal, scope["path"])(scope, receive, send)
            return
        identity = scope["identity"]
        self._running[identity] += 1
        self._state.requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.requests -= 1
            self._running[identity] -= 1
            self._running += Counter()  # drops entries at 0

    def _admit(self, scope: Scope) -> None:
        if self._state.draining:
            raise ApiError(503, "The server is shutting down.", code="engine_unavailable", headers=RETRY)
        if self._running[scope["identity"]] >= self._limit:
            message = (
                f"{self._limit} requests with this API key are running, which is the limit. "
                "Try again when one of them has ended."
            )
            raise ApiError(429, message, code="too_many_requests", headers=RETRY)
        seconds = min(self._timeout, _asked_timeout(Headers(scope=scope).get(TIMEOUT_HEADER)))
        if seconds < math.inf:
            scope["request_trace"].timeout_s = seconds
            scope["request_trace"].deadline = asyncio.get_running_loop().time() + seconds


def _asked_timeout(header: str | None) -> float:
    """Return the timeout that a request asks for, in seconds. The server's own timeout applies too."""
    if header is None:
        return math.inf
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        message = f"{TIMEOUT_HEADER}: must be a number of seconds above 0, got {header!r:.40}"
        raise ApiError(400, message, code="invalid_value")
    return seconds
