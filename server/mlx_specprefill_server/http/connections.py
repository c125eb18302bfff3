"""Limits before any key: open connections and files, the length of headers, the time of headers, bodies and reading.

uvicorn has no limits on the number of connections, the length of headers and the time they take with httptools. Its
`limit_concurrency` counts silent connections, and then answers every request with 503, also /health.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from pathlib import Path
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from mlx_specprefill import SpecPrefillError

from .errors import RETRY_AFTER_S, ApiError

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
HEADER_LIMIT = 64 << 10  # bytes of a request's line and headers
HEADER_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 120.0
WRITE_TIMEOUT_S = 300.0  # seconds without a read by the client
RESERVED = 24  # descriptors for files, and for connections that are accepted before they can be refused
FEWEST = 8  # the fewest connections that make a usable server
LARGEST_LIMIT = 10_240  # open files; macOS accepts no higher number, whatever its hard limit is
OPEN_FILES = Path("/dev/fd")


class DescriptorsError(SpecPrefillError):
    """The process may not open enough files and connections."""


def raise_open_files_limit(connections: int) -> int:
    """Raise the limit on open files as far as needed and possible. Return the number of connections it allows.

    Raises:
        DescriptorsError: too few; the message names the remedy.
    """
    used = len(os.listdir(OPEN_FILES)) + RESERVED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(used + connections, LARGEST_LIMIT)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    room = connections if soft == resource.RLIM_INFINITY else min(connections, soft - used)
    if room < min(connections, FEWEST):
        raise DescriptorsError(
            f"the limit on open files is {soft}, and this server needs at least {used + FEWEST}: raise it with "
            f"`ulimit -Hn {used + FEWEST}` or higher in the shell or service that starts the server"
        )
    if room < connections:
        logger.warning("at most %d connections: the limit on open files is %d", room, soft)
    return room


class Connections:
    """The connections of a server, oldest first. At most `most` may be open."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: dict[LimitedProtocol, None] = {}

    def add(self, new: LimitedProtocol) -> bool:
        """Register a connection and return whether there is room for it.

        If there is none, the oldest connection without a running request is closed.
        """
        self._open[new] = None
        if len(self._open) <= self.most:
            return True
        for connection in self._open:
            if connection is not new and connection.is_idle:
                self.remove(connection)
                connection.transport.abort()
                return True
        return False

    def remove(self, connection: LimitedProtocol) -> None:
        self._open.pop(connection, None)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the bytes of headers and on the time for headers, body and reading."""

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._connections = connections
        self._timer: asyncio.TimerHandle | None = None  # the deadline of the client's next data
        self._reading: asyncio.TimerHandle | None = None  # the deadline of the client's next read
        self._in_head = True
        self._head_bytes = 0  # raw header bytes
        self._too_long = False

    @property
    def is_idle(self) -> bool:
        """True while no request runs."""
        return (self.cycle is None or self.cycle.response_complete) and not self.pipeline

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._connections.add(self):
            self._await(HEADER_TIMEOUT_S)
        else:
            message = f"All {self._connections.most} connections are busy. Try again later."
            self._refuse(ApiError(503, message, code="engine_unavailable"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._await(None)
        self._watch_reading(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEADER_LIMIT:
            self._refuse(self._head_too_long())

    def on_message_begin(self) -> None:
        if self._timer is None:
            self._await(HEADER_TIMEOUT_S)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        # a head that came in one piece with something else
        self._too_long = len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEADER_LIMIT
        if self._too_long:
            raise httptools.HttpParserError
        self._in_head = False
        super().on_headers_complete()
        # The body of a request that waits for another on the same connection is not read.
        self._await(None if self.pipeline else BODY_TIMEOUT_S)

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._await(None)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._head_too_long() if self._too_long else ApiError(400, msg, code="invalid_http"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading(WRITE_TIMEOUT_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_reading(None)

    def _head_too_long(self) -> ApiError:
        message = f"The headers are longer than {HEADER_LIMIT} bytes."
        return ApiError(431, message, code="headers_too_large")

    def _await(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        if self._in_head and not self.is_idle:
            self._await(HEADER_TIMEOUT_S)  # the next request is not read before the answer is over
        elif self._in_head and not self._head_bytes:
            self.transport.close()  # a browser's spare connection
        else:
            part, seconds = ("header", HEADER_TIMEOUT_S) if self._in_head else ("body", BODY_TIMEOUT_S)
            message = f"The request's {part} did not arrive within {seconds:g} s."
            self._refuse(ApiError(408, message, code="request_incomplete"))

    def _watch_reading(self, seconds: float | None) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None if seconds is None else self.loop.call_later(seconds, self._not_read)

    def _not_read(self) -> None:
        logger.warning("a connection is closed: its client has read nothing for %g s", WRITE_TIMEOUT_S)
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, after an error response unless a response has begun."""
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(_response(error))
        self.transport.close()


def _response(error: ApiError) -> bytes:
    body = orjson.dumps(error.body())
    retry = f"retry-after: {RETRY_AFTER_S}\r\n" if error.status == 503 else "x-should-retry: false\r\n"
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{retry}\r\n"
    return STATUS_LINE[error.status] + head.encode() + body
