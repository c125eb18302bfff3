"""The stream of a request whose model is still being loaded: signs of life in the dialect's form, then the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import orjson
from fastapi import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..http.access_log import current_deadline
from ..http.errors import ANTHROPIC_PATH, error_response
from ..http.event_stream import DONE, EVENT_STREAM_HEADERS, comment, data_event, named_event
from ..http.while_connected import client_left
from ..report import PROGRESS_S
from .entry import Entry
from .pool import Models

RESPONSES_PATH = "/v1/responses"
HEADERS = {**EVENT_STREAM_HEADERS, "content-type": "text/event-stream; charset=utf-8"}


class StillLoadingError(Exception):
    """A streamed request names a model that is not in memory yet. It ends the handler, not the request."""

    def __init__(self, models: Models, entry: Entry) -> None:
        super().__init__(entry.id)
        self.models = models
        self.entry = entry


async def answer_when_loaded(request: Request, waits: StillLoadingError) -> Response:
    """Handle the exception by a stream that waits for the model."""
    return _LoadingStream(waits.models, waits.entry, request.scope["path"])


class _LoadingStream(Response):
    """A response that reports the progress of loading and then handles the request once more. Its body has been read.

    The status is 200 from the first byte on. Later failures take the dialect's form for failures in a stream.
    """

    def __init__(self, models: Models, entry: Entry, path: str) -> None:
        self.background = None
        self._models = models
        self._entry = entry
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with self._models.use(self._entry):
            if await self._wait_for_model(receive, send):
                await scope["app"].router(dict(scope), receive, self._within(send))

    async def _wait_for_model(self, receive: Receive, send: Send) -> bool:
        """Wait for the model. Return False if the stream is over."""
        loading = asyncio.create_task(self._models.load(self._entry))
        leaving = asyncio.create_task(client_left(receive))
        deadline = current_deadline()
        try:
            while not (loading.done() or leaving.done()):
                if deadline is not None and asyncio.get_running_loop().time() >= deadline[0]:
                    raise deadline[1]
                await send(_body(self._sign_of_life()))
                await asyncio.wait((loading, leaving), timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
            return loading.done()
        except Exception as error:  # noqa: BLE001 - whatever it is, headers are out
            failure = bytes(error_response(error, self._path).body)
            await send(_body(self._failure(failure), more=False))
            return False
        finally:
            loading.cancel()
            leaving.cancel()

    def _within(self, send: Send) -> Callable[[Message], Any]:
        """Send the handler's response as a part of this one."""
        status, failure = [200], bytearray()

        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            elif status[0] == 200:
                await send(message)
            else:
                failure.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    await send(_body(self._failure(bytes(failure)), more=False))

        return pass_on

    def _sign_of_life(self) -> bytes:
        """Return an event that every client of the dialect skips. Most clients reject other data before an answer's
        first event.
        """
        progress = {"model": self._entry.id, "state": self._entry.state, **asdict(self._entry.progress)}
        if self._path == ANTHROPIC_PATH:
            return named_event({"type": "ping", "loading": progress})
        return comment("loading", progress)

    def _failure(self, body: bytes) -> bytes:
        """Return an error object in the form of a response's body."""
        failure = orjson.loads(body)
        if self._path == ANTHROPIC_PATH:
            return named_event(failure)
        if self._path == RESPONSES_PATH:
            return named_event(self._failed_response(failure["error"]))
        return data_event(failure) + DONE

    def _failed_response(self, error: dict[str, Any]) -> dict[str, Any]:
        """Return the event of a failed response. Agents retry on every code that does not rule out success."""
        code = "server_error" if error["code"] in ("no_room_for_model", "engine_unavailable") else "invalid_prompt"
        response = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": self._models.state.started,
            "model": self._entry.id,
            "status": "failed",
            "output": [],
            "error": {"code": code, "message": error["message"]},
        }
        return {"type": "response.failed", "sequence_number": 0, "response": response}


def _body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
