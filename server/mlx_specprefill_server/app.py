"""The application and its process."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from types import FrameType

import uvicorn
from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.middleware.cors import CORSMiddleware

from mlx_specprefill import Engine

from . import __version__, errors
from .anthropic import messages
from .connections import MAX_CONNECTIONS, Connections, LimitedProtocol, address, network_address, raise_open_files_limit
from .dependencies import StillLoadingError, answer_when_loaded
from .middleware import AccessLogMiddleware, AuthMiddleware, HeadMiddleware, PathMiddleware, RequestLimitMiddleware
from .models.models import Models
from .openai import chat, completions, responses
from .openai import models as model_list
from .routes import page, prompts, status
from .serving import Service
from .settings import Settings

logger = logging.getLogger(__name__)

ON: TelemetryConfig = {"auto_configure": True, "logs": False}  # records of exceptions might quote prompts
OFF: TelemetryConfig = {"auto_configure": False, "tracing": False, "metrics": False, "logs": False}

LOST_STATUS = 1
TELLING_S = 5.0  # seconds for the last answers, and for /health to report the loss
ENDING_S = 10  # seconds for connections to close after their answers have ended


def create_app(engine: Engine, settings: Settings) -> FastAPI:
    """Return the ASGI application over a started engine. `app.state.models.state.stop()` ends all running answers."""
    return app_of(Models.of(Service(engine, settings)))


def app_of(models: Models) -> FastAPI:
    """Return the ASGI application of one model or several."""
    settings = models.state.settings
    app = FastAPI(
        title="mlx-specprefill",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=ON if settings.otel else OFF,
    )
    app.state.models = models
    errors.install(app)
    app.add_exception_handler(StillLoadingError, answer_when_loaded)  # type: ignore[arg-type] # of that exception alone
    app.add_middleware(RequestLimitMiddleware, state=models.state, settings=settings)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(AuthMiddleware, settings=settings)
    if settings.cors_origins:  # outside of AuthMiddleware: a preflight has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
        )
    app.add_middleware(AccessLogMiddleware)
    app.add_middleware(PathMiddleware)
    modules = (page, status, prompts, chat, completions, responses, messages, model_list)
    routers = [module.router for module in modules]
    for router in routers:
        app.include_router(router)
    app.openapi = cache(partial(page.openapi_document, app, routers))  # type: ignore[method-assign]
    return app


class Server(uvicorn.Server):
    """A uvicorn server that shuts down in two steps.

    SIGTERM lets running requests finish for a while. After that, at a second SIGTERM, or at SIGINT, every stream gets
    its finish chunk and [DONE], and the engine stops.

    Attributes:
        lost: reason why nothing could be computed any more, if the server ended by itself.
    """

    def __init__(self, config: uvicorn.Config, models: Models) -> None:
        super().__init__(config)
        self._models, self._state = models, models.state
        self._end_at = math.inf
        self._awake = Awake()
        self.lost: str | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. It may interrupt the main thread anywhere."""
        if sig != signal.SIGTERM or self._state.draining:
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        self._end_at = min(self._end_at, time.monotonic() + self._state.settings.shutdown_grace_s)
        self._state.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the addresses. uvicorn logs them only if it has bound the sockets itself."""
        await super().startup(sockets)
        self._models.start()
        for listener in sockets or []:
            logger.info("running on %s (Ctrl-C ends it)", address(listener))
        for line in greeting(self._models, sockets or []):
            logger.info("%s", line)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to shut down. Called ten times a second."""
        now = time.monotonic()
        if self.lost is None and (lost := self._models.lost) is not None:
            self.lost, self._end_at = lost, now + TELLING_S
        self._awake.note(bool(self._state.requests))
        over = now >= self._end_at
        # /health reports a loss before the exit. Of several ranks, mlx.launch sends SIGTERM earlier.
        if over or (self._state.draining and not self._state.requests and self.lost is None):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.stop()
        self._awake.end()
        await super().shutdown(sockets)
        await self._models.close()


def make_server(app: FastAPI, settings: Settings, connections: int = MAX_CONNECTIONS) -> Server:
    """Return the server of an application that `create_app` made, with a limit on open connections."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=partial(LimitedProtocol, Connections(connections)),  # type: ignore[arg-type] # it is only called
        ws="none",
        timeout_graceful_shutdown=ENDING_S,
        server_header=False,
        log_config=None,  # its records go to our handler
        access_log=False,  # AccessLogMiddleware writes the lines
    )
    return Server(config, app.state.models)


def serve_models(models: Models, sockets: list[socket.socket]) -> None:
    """Serve on bound sockets until SIGINT or SIGTERM, and close the engines.

    Raises:
        DescriptorsError: the process may not open enough connections.
        SystemExit: nothing could be computed any more. A service manager then starts another process.
    """
    connections = raise_open_files_limit(MAX_CONNECTIONS)
    server = make_server(app_of(models), models.state.settings, connections)
    server.run(sockets)
    if server.lost is not None:
        logger.error("%s: this process ends with exit status %d", server.lost, LOST_STATUS)
        raise SystemExit(LOST_STATUS)


def greeting(models: Models, sockets: Sequence[socket.socket]) -> Iterator[str]:
    """Return the greeting's log lines. They never contain a key that the server asks for."""
    settings, service = models.state.settings, models.default.service
    if models.several:
        names = ", ".join(entry.id + (" (stays in memory)" if entry.pin else "") for entry in models)
        yield f"serving {names}: loaded when they are asked for, {models.default.id} where a request names none"
    elif service is not None:
        yield f"serving {service.model_id}: {_draft(service)}, context {service.context_length} tokens"
    if not sockets:
        return
    base = address(sockets[0], reachable=True)
    keyed = bool(settings.api_keys or settings.admin_keys)
    other = "" if (outside := network_address(sockets[0])) is None else f", from other machines {outside}"
    yield f"the page is {base}{other}{'; it asks for a key' if keyed else ''}"
    yield f"an example: {_example(base, keyed)}"


def _draft(service: Service) -> str:
    pair = service.engine.pair
    if pair.sparse_refusal is not None:
        return f"full prefill only ({pair.sparse_refusal})"
    if service.draft_id is None:
        return "no draft, full prefill only"
    threshold = service.settings.specprefill_threshold
    if not service.settings.specprefill:
        when = "a request asks for it"
    else:
        when = "it is predicted to pay" if threshold is None else f"a prompt is longer than {threshold} tokens"
    scorer = "draft" if pair.stages is None else "prefilled in stages, scored by"
    return f"{scorer} {service.draft_id}, sparse where {when}"


def _example(base: str, keyed: bool) -> str:
    body = {
        "messages": [{"role": "user", "content": "The code of Paris is 4711. What is the code of Paris?"}],
        "max_tokens": 40,
    }
    key = ' -H "authorization: Bearer $KEY"' if keyed else ""
    return f"curl -s {base}/v1/chat/completions{key} -d {shlex.quote(json.dumps(body))}"


_LINGER_S = 10.0  # after the last request: an agent's next turn often comes at once


class Awake:
    """A process of macOS's `caffeinate`, from the first request until some seconds after the last. None on other
    systems.
    """

    def __init__(self) -> None:
        self._program = shutil.which("caffeinate") if sys.platform == "darwin" else None
        self._process: subprocess.Popen[bytes] | None = None
        self._until = 0.0

    def note(self, busy: bool) -> None:
        """Start or end the process. `busy` means that requests are running."""
        if self._program is None:
            return
        now = time.monotonic()
        if busy:
            self._until = now + _LINGER_S
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen([self._program, "-i", "-w", str(os.getpid())])
        elif now >= self._until:
            self.end()

    def end(self) -> None:
        """Let the machine sleep again."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()
