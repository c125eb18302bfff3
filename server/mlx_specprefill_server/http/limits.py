"""Limits on running requests: how many one key may have, how long each may take, and none while the server ends."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..settings.server import Settings
from .auth import Identity
from .body_room import BodyPlace, BodyRoom
from .errors import RETRY_AFTER_S, ApiError, DeadlineError, error_response

TIMEOUT_HEADER = "x-request-timeout"  # seconds
RETRY = {"Retry-After": RETRY_AFTER_S}


class Load(Protocol):
    """POST requests that have no response yet, whether new ones are refused, and the room for their bodies."""

    requests: int
    draining: bool
    bodies: BodyRoom


class RequestLimitMiddleware:
    """ASGI middleware behind AuthMiddleware that limits POST requests. Other requests cost next to nothing."""

    def __init__(self, app: ASGIApp, state: Load, settings: Settings) -> None:
        self._app = app
        self._state = state
        self._limit = settings.max_requests_per_key or math.inf
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
        place = scope["body_place"] = BodyPlace(self._state.bodies)
        try:
            await self._app(scope, receive, send)
        finally:
            place.close()
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
        seconds = _timeout_of(Headers(scope=scope).get(TIMEOUT_HEADER))
        if seconds < math.inf:
            scope["request_trace"].deadline = asyncio.get_running_loop().time() + seconds, DeadlineError(seconds)


def _timeout_of(header: str | None) -> float:
    """Return the timeout that a request asks for, in seconds."""
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
