"""Middleware around every route, and the access to it.

Paths and HEAD work as clients write them. The access log has one line per request with path, status, times and token
counts, never any content. The Host header, the API key and cross-site posts from a browser are checked before anything
else. POST requests are limited by number and time.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, Any, Protocol
from urllib.parse import quote
from uuid import uuid4

from fastapi import Depends, Request
from opentelemetry import trace
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_specprefill import CacheLabel, Finished

from .errors import RETRY_AFTER_S, ApiError, DeadlineError, error_response
from .generation.generation import AnswerResult
from .settings import Settings

logger = logging.getLogger(__name__)

VERSIONED = ("chat", "completions", "messages", "models", "responses")  # of paths that some clients call without /v1
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


REQUEST_ID = "x-request-id"
SANE_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
LONGEST_PATH = 200
PATIENCE_S = 5.0  # seconds that a line waits for answers that the engine has not ended
# Polled often: logged at level debug unless they fail.
QUIET = ("/health", "/metrics", "/v1/specprefill/stats", "/v1/specprefill/cache", "/v1/specprefill/verdicts")


class RequestTrace:
    """One request and its response. Used on the event loop."""

    def __init__(self, scope: Scope) -> None:
        asked = Headers(scope=scope).get(REQUEST_ID, "")
        self.id = asked if SANE_ID.fullmatch(asked) else f"req_{uuid4().hex}"
        self.method = scope["method"]
        self.path = quote(scope["path"], safe="/:@,+=~")[:LONGEST_PATH]  # a client's path must not break the line
        self.status = 0
        self.answers: list[AnswerResult] = []
        self.running = 0
        self.deadline: tuple[float, DeadlineError] | None = None  # by the event loop's clock; the error at that time
        self.made = time.monotonic()
        self._begun = time.perf_counter()
        self._ms: float | None = None  # None: the response is not over
        self._logged = False

    def add_answer(self, result: AnswerResult) -> None:
        """Note the end of an answer."""
        self.answers.append(result)
        self.running -= 1
        self._log_when_complete()

    def end(self) -> None:
        """Note the end of the response, complete or not."""
        self._ms = 1e3 * (time.perf_counter() - self._begun)
        self._log_when_complete()
        if not self._logged:
            asyncio.get_running_loop().call_later(PATIENCE_S, self._log)

    def _log_when_complete(self) -> None:
        if self._ms is not None and self.running <= 0:
            self._log()

    def _log(self) -> None:
        if self._logged:
            return
        self._logged = True
        head = {"request_id": self.id, "method": self.method, "path": self.path, "status": self.status}
        fields = {**head, "ms": round(self._ms or 0.0, 1), **_usage_fields(self.answers)}
        level = logging.DEBUG if self.path in QUIET and self.status < 400 else logging.INFO
        logger.log(level, "%s %s %s", self.method, self.path, self.status, extra={"fields": fields})


def _usage_fields(answers: Sequence[AnswerResult]) -> dict[str, Any]:
    """Return times and mode of the first prompt, and sums of tokens. Each prompt counts once for all its answers."""
    reports = [(answer.copy, answer.event.report) for answer in answers if answer.event.report is not None]
    if not reports:
        return {}
    prompts = [report for copy, report in reports if not copy] or [reports[0][1]]
    first = prompts[0]
    miss = next((report.miss for report in prompts if report.miss is not None), None)
    return {
        "queue_ms": round(first.timings.queue_ms, 1),
        "ttft_ms": round(first.timings.queue_ms + first.timings.ttft_ms, 1),
        "prompt_tokens": sum(report.prompt_tokens for report in prompts),
        "cached_tokens": sum(report.cached_tokens for report in prompts),
        "kept_tokens": sum(report.kept_tokens for report in prompts),
        **({} if miss is None else {"miss_token": miss.token, "miss_kind": miss.kind}),
        "completion_tokens": sum(
            answer.event.completion_tokens for answer in answers if isinstance(answer.event, Finished)
        ),
        "mode": first.mode,
        "reason": first.reason,
        "finish": ",".join(dict.fromkeys(answer.reason for answer in answers)),
    }


_current: ContextVar[RequestTrace | None] = ContextVar("request_trace", default=None)


def current_trace() -> RequestTrace | None:
    """Return the current request, None outside of one."""
    return _current.get()


class AccessLogMiddleware:
    """ASGI middleware that gives each request its id and writes its log line.

    The line of a generating request waits for its answers' reports, also if the client has left.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_trace = scope["request_trace"] = RequestTrace(scope)
        token = _current.set(request_trace)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_trace.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_trace.id
            elif not message.get("more_body", False):  # a trace's span ends with this message
                spent = {"request_id": request_trace.id, **_usage_fields(request_trace.answers)}
                named = {f"specprefill.{name}": value for name, value in spent.items()}
                trace.get_current_span().set_attributes(named)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            request_trace.status = request_trace.status or 500
            raise
        finally:
            _current.reset(token)
            request_trace.end()


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


class Load(Protocol):
    """POST requests that have no response yet, and whether new ones are refused."""

    requests: int
    draining: bool


class RequestLimitMiddleware:
    """ASGI middleware behind AuthMiddleware that limits POST requests. Other requests cost next to nothing."""

    def __init__(self, app: ASGIApp, state: Load, settings: Settings) -> None:
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
            scope["request_trace"].deadline = asyncio.get_running_loop().time() + seconds, DeadlineError(seconds)


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


OPEN_PATHS = ("/", "/health")  # no key needed
OPEN_FOLDER = "/web/"  # nor for the page's files


class AuthMiddleware:
    """ASGI middleware in front of every route. A disconnect still reaches the endpoint."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._identities = identities_by_key(settings)
        self._anonymous = Identity(admin=True, shares_cache=settings.share_cache)  # without keys all see everything
        self._names = {name.lower().strip("[]") for name in settings.allowed_hosts}
        self._names |= {"localhost", settings.host.lower()}
        self._any_host = "*" in self._names
        self._any_address = not _is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope), scope) if scope["type"] == "http" else None
        app = self._app if refusal is None else error_response(refusal, scope["path"])
        await app(scope, receive, send)

    def _refusal(self, headers: Headers, scope: Scope) -> ApiError | None:
        """Return a refusal, or None if the request may pass. Set the scope's "identity"."""
        if not self._is_host_allowed(headers.get("host", "")):
            message = f"Host {headers.get('host', '')!r:.100} is not allowed. Allow its name with --allowed-host."
            return ApiError(403, message, code="host_not_allowed")
        if scope["method"] == "POST" and "origin" in headers:
            # A page may post other types across sites without asking. JSON needs a preflight, which is never granted.
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                message = "Requests from a web page need Content-Type: application/json."
                return ApiError(415, message, code="unsupported_media_type")
        identity = self._identity(headers) if self._identities else self._anonymous
        if identity is None and scope["path"] not in OPEN_PATHS and not scope["path"].startswith(OPEN_FOLDER):
            message = "Incorrect API key provided. Send it as 'Authorization: Bearer <key>' or 'x-api-key'."
            return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        scope["identity"] = identity or Identity()
        return None

    def _is_host_allowed(self, header: str) -> bool:
        """Return whether the Host header is allowed. DNS rebinding needs the attacker's own host name; IP addresses are
        safe.
        """
        name = header.lower()
        host = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]  # without the port
        if self._any_host or host in self._names or host.endswith(".localhost") or _is_loopback(host):
            return True
        return self._any_address and _is_address(host)

    def _identity(self, headers: Headers) -> Identity | None:
        """Return the identity of the request's key, None without a valid key."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        # Clients that are signed in elsewhere send that token too, so either header may hold the key.
        given = [text.encode("latin-1") for text in (bearer, headers.get("x-api-key", ""))]
        # every comparison runs to its end, so its time reveals nothing about a key
        identities = [
            identity for text in given for key, identity in self._identities.items() if hmac.compare_digest(text, key)
        ]
        return identities[0] if identities else None


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


# Names appear in cache folders, where a plain hash of a short key could be looked up. About 10 ms per key, at start.
SCRYPT = {"n": 2**12, "r": 8, "p": 1, "salt": b"mlx-specprefill cache owner"}


@dataclass(frozen=True, slots=True)
class Identity:
    """The clients that use one API key.

    Attributes:
        name: a digest of the key; empty on a server with at most one key.
        admin: sees the cached prompts and recent answers of all keys.
        shares_cache: all keys use its cached prompts.
    """

    name: str = ""
    admin: bool = False
    shares_cache: bool = False

    def cache_label(self, cache_salt: str | None) -> CacheLabel:
        """Return the label of a request's cached prompt. `cache_salt` separates requests with the same key."""
        owner = "" if self.shares_cache else self.name
        if cache_salt is None:
            return CacheLabel(owner)
        digest = hashlib.blake2b(cache_salt.encode(), key=owner.encode(), digest_size=16)
        return CacheLabel(owner, digest.hexdigest())

    @property
    def visible_cache(self) -> str | None:
        """The owner of the cached prompts that this identity may list and drop; None means all owners."""
        return None if self.admin else self.cache_label(None).owner

    @property
    def visible_answers(self) -> str | None:
        """The name of the identity whose recent answers this one may see; None means all identities."""
        return None if self.admin else self.name


def identities_by_key(settings: Settings) -> Mapping[bytes, Identity]:
    """Return the identity of each key. Several keys are several identities."""
    admins, others = (
        {key.get_secret_value().encode() for key in keys} for keys in (settings.admin_keys, settings.api_keys)
    )
    several = len(admins | others) > 1
    return {
        key: Identity(_name(key) if several else "", admin=key in admins, shares_cache=settings.share_cache)
        for key in sorted(admins | others)
    }


def _name(key: bytes) -> str:
    return hashlib.scrypt(key, dklen=16, **SCRYPT).hex()  # type: ignore[arg-type]


async def _identity(request: Request) -> Identity:  # a plain function would be called on a worker thread
    identity: Identity = request.scope["identity"]
    return identity


IdentityDep = Annotated[Identity, Depends(_identity)]
