"""Server-sent events: their bytes, the headers of a stream, and the end of its generation when the stream ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..big_json import dumps
from ..generation.generation import Generation

EVENT_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
LINE_BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}


def data_event(payload: Any) -> bytes:
    """Return one event. JSON has no raw line breaks, so one `data:` line is enough.

    Characters within its strings that some clients take for line breaks are escaped.
    """
    raw = dumps(payload)
    if not raw.isascii():
        for char, escape in LINE_BREAKS.items():
            raw = raw.replace(char, escape)
    return b"data: " + raw + b"\n\n"


def comment(word: str, payload: Any) -> bytes:
    """Return a line that every client of event streams skips and that people and tests can read."""
    return f": {word} ".encode() + orjson.dumps(payload) + b"\n\n"


def named_event(payload: dict[str, Any]) -> bytes:
    """Return one event under the name of its type. Some clients skip events without a name."""
    name: str = payload["type"]
    return b"event: " + name.encode() + b"\n" + data_event(payload)


class EventStream(StreamingResponse):
    """A stream of events that closes its generation however the response ends, even before the first byte."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        super().__init__(events, headers=EVENT_STREAM_HEADERS)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()
