"""The process of the server: signals, its end in two steps, and its exit status when the engine is lost."""

from __future__ import annotations

import logging
import math
import signal
import socket
import time
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ..http.connections import MAX_CONNECTIONS, Connections, LimitedProtocol, raise_open_files_limit
from ..http.sockets import address, listen
from ..models.pool import Models
from ..settings.server import Settings
from .app import create_app
from .awake import Awake
from .greeting import greeting

logger = logging.getLogger(__name__)

LOST_STATUS = 1
GRACE_S = 30.0  # seconds that running requests have to finish after SIGTERM
TELLING_S = 5.0  # seconds for the last answers, and for /health to report the loss
ENDING_S = 10  # seconds for connections to close after their answers have ended


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
        self._told = False  # that it ends
        self.lost: str | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. It may interrupt the main thread anywhere."""
        if sig != signal.SIGTERM or self._state.draining:
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        self._end_at = min(self._end_at, time.monotonic() + GRACE_S)
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
        if self._state.draining and not self._told:
            self._told = True
            running = self._state.requests
            logger.info("SIGTERM: ending; %d running requests have %.0f s to finish", running, self._end_at - now)
        if now >= self._end_at or (self._state.draining and not self._state.requests):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.stop()
        self._awake.end()
        await super().shutdown(sockets)
        await self._models.close()
        logger.info("the server has ended")


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
        OSError: another program has the port.
        SystemExit: nothing could be computed any more. A service manager then starts another process.
    """
    connections = raise_open_files_limit(MAX_CONNECTIONS)
    server = make_server(create_app(models), models.state.settings, connections)
    listen(sockets)
    server.run(sockets)
    if server.lost is not None:
        logger.error("%s: this process ends with exit status %d", server.lost, LOST_STATUS)
        raise SystemExit(LOST_STATUS)
