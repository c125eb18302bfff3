"""Paths and HEAD as clients write them: without /v1, with a slash at the end, HEAD wherever there is GET."""

from __future__ import annotations

from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

VERSIONED = ("chat", "completions", "decisions", "messages", "models", "responses")  # clients leave out /v1
OWN_HEAD = ("/", "/health")  # paths with their own answer to HEAD


class PathMiddleware:
    """Outermost ASGI middleware: `/v1/models/` and `/models` are `/v1/models`, also for authentication and the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].rstrip("/") or "/"
            scope["path"] = f"/v1{path}" if path[1:].partition("/")[0] in VERSIONED else path
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
