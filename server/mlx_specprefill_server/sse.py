"""Server-sent events: framing, and a response that always closes its generation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .generating.generation import Generation

__all__ = [
    "DONE",
    "EVENT_STREAM_HEADERS",
    "KEEP_ALIVE",
    "EventStream",
    "TextEvents",
    "comment",
    "data_event",
    "named_event",
]

EVENT_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def data_event(payload: Any) -> bytes:
    """One event; JSON has no raw line breaks, so one `data:` line is enough."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def comment(word: str, payload: Any) -> bytes:
    """A line that every client of event streams skips, and that people and tests can read."""
    return f": {word} ".encode() + orjson.dumps(payload) + b"\n\n"


def named_event(payload: dict[str, Any]) -> bytes:
    """One event under the name of its type, without which some clients skip it."""
    name: str = payload["type"]
    return b"event: " + name.encode() + b"\n" + data_event(payload)


class TextEvents:
    """Events that differ in one text: what is around it is written once.

    Args:
        event: with the given text, as one of its strings or several.
    """

    def __init__(self, event: Callable[[str], bytes]) -> None:
        place = uuid4().hex
        self._around = event(place).split(orjson.dumps(place))

    def of(self, text: str) -> bytes:
        return orjson.dumps(text).join(self._around)


class EventStream(StreamingResponse):
    """Streams events and closes their generation however the response ends, even before the first byte."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        super().__init__(events, headers=EVENT_STREAM_HEADERS)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()
