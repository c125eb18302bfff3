"""The access log: the fields that are logged of each request (id, path, status, times, tokens), never any content.

The id and the deadline of the current request are read from here.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import InitVar, dataclass, field
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_specprefill import Finished

from ..generation.generation import AnswerResult
from .errors import DeadlineError

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
SANE_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
LONGEST_PATH = 200
PATIENCE_S = 5.0  # seconds that a line waits for answers that the engine has not ended
# Polled often, and the files of the page: logged at level debug unless they fail.
QUIET = ("/health", "/metrics", "/v1/specprefill/stats", "/v1/specprefill/cache", "/v1/specprefill/verdicts")
QUIET_FOLDER = "/web/"
STAGES = ("queue_ms", "ttft_ms", "draft_ms", "select_ms", "prefill_ms", "decode_ms")

_current: ContextVar[RequestTrace | None] = ContextVar("request_trace", default=None)


@dataclass(eq=False)
class RequestTrace:
    """One request and its response. Used on the event loop."""

    scope: InitVar[Scope]
    status: int = 0
    answers: list[AnswerResult] = field(default_factory=list)
    running: int = 0
    deadline: tuple[float, DeadlineError] | None = None  # by the event loop's clock; the error at that time
    made: float = field(default_factory=time.monotonic)
    _begun: float = field(default_factory=time.perf_counter)
    _ms: float | None = None  # None: the response is not over
    _logged: bool = False

    def __post_init__(self, scope: Scope) -> None:
        given = Headers(scope=scope).get(REQUEST_ID, "")
        self.id = given if SANE_ID.fullmatch(given) else f"req_{uuid4().hex}"
        self.method = scope["method"]
        self.path = quote(scope["path"], safe="/:@,+=~")[:LONGEST_PATH]  # a client's path must not break the line

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
        quiet = self.path in QUIET or self.path.startswith(QUIET_FOLDER)
        level = logging.DEBUG if quiet and self.status < 400 else logging.INFO
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
        **{name: round(ms, 1) for name in STAGES if (ms := getattr(first.timings, name)) is not None},
        "prompt_tokens": sum(report.prompt_tokens for report in prompts),
        "cached_tokens": sum(report.cached_tokens for report in prompts),
        "kept_tokens": sum(report.kept_tokens for report in prompts),
        **({} if miss is None else {"miss_token": miss.token, "miss_kind": miss.kind}),
        "completion_tokens": sum(
            answer.event.completion_tokens for answer in answers if isinstance(answer.event, Finished)
        ),
        **({} if first.reached is None else {"stage": first.reached.stage, "stage_tokens": first.reached.tokens}),
        "mode": first.mode,
        "reason": first.reason,
        "finish": ",".join(dict.fromkeys(answer.reason for answer in answers)),
    }


def current_trace() -> RequestTrace | None:
    """Return the current request, None outside of one."""
    return _current.get()


def current_deadline() -> tuple[float, DeadlineError] | None:
    """Return the current request's deadline by the event loop's clock, and the error at that time."""
    current = current_trace()
    return None if current is None else current.deadline


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
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            request_trace.status = request_trace.status or 500
            raise
        finally:
            _current.reset(token)
            request_trace.end()
