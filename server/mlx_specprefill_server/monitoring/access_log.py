"""Logs of the process, and the access log: one line per request with path, status, times and token counts.

Never any content. The line of a generating request waits for its answers' reports, also if the client has left.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from opentelemetry import trace
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_specprefill import Event, Finished, PrefillReport, Progress, TokenEvent

from ..generation.generation import AnswerResult

logger = logging.getLogger(__name__)

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
        self.deadline: float | None = None  # by the event loop's clock
        self.timeout_s = 0.0  # seconds from the arrival to the deadline
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
        fields = self.fields()
        level = logging.DEBUG if self.path in QUIET and self.status < 400 else logging.INFO
        logger.log(level, "%s %s %s", self.method, self.path, self.status, extra={"fields": fields})

    def fields(self) -> dict[str, Any]:
        """Return the fields of the log line, in order."""
        head = {"request_id": self.id, "method": self.method, "path": self.path, "status": self.status}
        return {**head, "ms": round(self._ms or 0.0, 1), **_usage_fields(self.answers)}


def _usage_fields(answers: Sequence[AnswerResult]) -> dict[str, Any]:
    """Return times and mode of the first prompt, and sums of tokens. Each prompt counts once for all its answers."""
    reports = [(answer.copy, answer.event.report) for answer in answers if answer.event.report is not None]
    if not reports:
        return {}
    prompts = [report for copy, report in reports if not copy] or [reports[0][1]]
    first = prompts[0]
    return {
        "queue_ms": round(first.timings.queue_ms, 1),
        "ttft_ms": round(first.timings.queue_ms + first.timings.ttft_ms, 1),
        "prompt_tokens": sum(report.prompt_tokens for report in prompts),
        "cached_tokens": sum(report.cached_tokens for report in prompts),
        "kept_tokens": sum(report.kept_tokens for report in prompts),
        **_miss_fields(prompts),
        "completion_tokens": sum(
            answer.event.completion_tokens for answer in answers if isinstance(answer.event, Finished)
        ),
        "mode": first.mode,
        "reason": first.reason,
        "finish": ",".join(dict.fromkeys(answer.reason for answer in answers)),
    }


def _miss_fields(prompts: Sequence[PrefillReport]) -> dict[str, Any]:
    """Return the first place from which a prompt was read again, and its kind, without any text."""
    miss = next((report.miss for report in prompts if report.miss is not None), None)
    return {} if miss is None else {"miss_token": miss.token, "miss_kind": miss.kind}


_current: ContextVar[RequestTrace | None] = ContextVar("request_trace", default=None)


def current_trace() -> RequestTrace | None:
    """Return the current request, None outside of one."""
    return _current.get()


class AccessLogMiddleware:
    """Outermost ASGI middleware: it gives each request its id and writes its log line."""

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
                trace.get_current_span().set_attributes(_attributes(request_trace))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            request_trace.status = request_trace.status or 500
            raise
        finally:
            _current.reset(token)
            request_trace.end()


def _attributes(request_trace: RequestTrace) -> dict[str, Any]:
    spent = {"request_id": request_trace.id, **_usage_fields(request_trace.answers)}
    return {f"specprefill.{name}": value for name, value in spent.items()}


class RunningRequest:
    """One request from its submission to its end. Several answers to it count as one. Used on the event loop.

    Attributes:
        identity: name of the API key's identity.
    """

    def __init__(self, request_id: str | None, identity: str, prompt_tokens: int) -> None:
        self.identity = identity
        self.begun = time.time()
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        # each stage with its start, in seconds since the epoch
        self._stages: list[tuple[str, float]] = [("queued", self.begun)]
        self._done = self._total = self._made = 0
        self._cached: int | None = None

    def update(self, event: Event) -> None:
        """Update the progress from an event of the engine."""
        match event:
            case Progress():
                self._enter(event.stage)
                self._done, self._total = event.done, event.total
                self._cached = self._cached if event.cached is None else event.cached
            case TokenEvent():
                self._enter("decode")
                self._made += 1
                self._done = self._total = 0

    def _enter(self, stage: str) -> None:
        if stage != self._stages[-1][0] and stage != "queued":
            self._stages.append((stage, time.time()))

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for the statistics. `done` of `total` tokens of the stage are 0 of 0 while unknown."""
        return {
            "request_id": self._request_id,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached,
            "stages": [{"stage": stage, "since": round(since, 3)} for stage, since in self._stages],
            "done": self._done,
            "total": self._total,
            "completion_tokens": self._made,
        }


HELD = 50


class RecentAnswers:
    """The last answers of each API key. Used on the event loop."""

    def __init__(self) -> None:
        # One queue per API key. A common one would reveal other keys' traffic by the time an answer stays in it.
        self._answers: defaultdict[str, deque[dict[str, Any]]] = defaultdict(partial(deque, maxlen=HELD))

    def add(self, result: AnswerResult, request_id: str | None, identity: str) -> None:
        report = result.event.report
        self._answers[identity].appendleft(
            {
                "request_id": request_id,
                "ended": round(time.time(), 3),
                "finish": result.reason,
                "completion_tokens": result.event.completion_tokens if isinstance(result.event, Finished) else 0,
                "specprefill": None if report is None else report.to_dict(),
            }
        )

    def newest_first(self, identity: str | None) -> list[dict[str, Any]]:
        """Return the answers to one API key, given by its identity's name, or to all keys if it is None."""
        shown = self._answers.values() if identity is None else [self._answers.get(identity, ())]
        return list(islice(merge(*shown, key=itemgetter("ended"), reverse=True), HELD))


CHATTY = ("httpx", "httpcore", "asyncio", "filelock", "urllib3", "uvicorn")  # they log internals at level info


def configure_logging(level: str, form: str = "text") -> None:
    """Send records from this level on to standard error, as "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return a record's extra fields, given as `extra={"fields": {...}}`."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


class TextFormatter(logging.Formatter):
    """The usual line. Extra fields replace the message, as `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        line = super().formatMessage(record)
        fields = [f"{name}={_format(value)}" for name, value in _fields(record).items() if name not in _IN_MESSAGE]
        return " ".join([line, *fields])


_IN_MESSAGE = ("method", "path", "status")


def _format(value: Any) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if " " in text or not text.isprintable() else text


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=True, default=str)
