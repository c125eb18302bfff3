"""Dependencies that the endpoints share: the request body, the model, and the watch on the client.

Bodies are read and checked in bounded time and memory. A streamed request waits for a model that is being loaded, with
signs of life in the dialect's form.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, TypeVar
from uuid import uuid4

import orjson
from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .big_json import loads
from .errors import ANTHROPIC_PATH, ApiError, error_response, refusal
from .models.loader import Entry
from .models.models import Models
from .nesting import DEEPEST, is_too_deep
from .report import DONE, EVENT_STREAM_HEADERS, PROGRESS_S, comment, data_event, named_event
from .serving import Service, client_left, current_deadline, while_connected

Model = TypeVar("Model", bound=BaseModel)

BODY_LIMIT = 32 << 20  # bytes
SMALL = 1 << 16  # bytes of a body that can't exceed the limits below
MOST_VALUES = 1 << 20  # values in one body; also the tokens of the longest prompt that models read today
MOST_CONTAINERS = 1 << 16  # arrays and objects in one body: a conversation has a few per message
MOST_MEMBERS = 1 << 15  # members of all objects in one body; each takes ten times as long to parse as a number
LONGEST_NAME = 256  # characters of a model's name, which answers and logs repeat


async def read_body(request: Request, limit: int) -> bytearray:
    """Return the body.

    Raises:
        ApiError: 413, as soon as it is known to be longer than `limit` bytes.
    """
    announced = request.headers.get("content-length", "")
    body = bytearray()
    if announced.isdigit() and len(announced) < 20 and int(announced) > limit:
        raise _too_large(limit)
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return body


def _too_large(limit: int) -> ApiError:
    message = f"The request body is larger than {limit} bytes."
    return ApiError(413, message, code="request_too_large")


def decompress(body: bytes | bytearray, encoding: str, limit: int) -> bytes | bytearray:
    """Return the decompressed body. The same limit applies to it.

    Raises:
        ApiError: 415, 400 or 413.
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip"):
        message = f"Content-Encoding {encoding!r:.40} is not supported; send the body as it is, or with gzip."
        raise ApiError(415, message, code="unsupported_media_type", headers={"Accept-Encoding": "gzip"})
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        text = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise ApiError(400, f"The body is not valid gzip: {error}", code="invalid_json") from error
    if len(text) > limit:
        raise _too_large(limit)
    if not stream.eof or stream.unused_data:
        raise ApiError(400, "The body is not one whole gzip stream.", code="invalid_json")
    return text


def parse_json(raw: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object without its nulls, which mean the default.

    Raises:
        ApiError: 400 for what is none, or holds more than any request needs.
        InvalidRequestError: the name of the model is too long.
    """
    if len(raw) > SMALL:
        _refuse_many_values(raw)
    try:
        body = loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    if is_too_deep(body):
        raise ApiError(400, f"The body is nested too deeply: more than {DEEPEST} levels.", code="invalid_json")
    check_model_name(body.get("model"))
    return {name: value for name, value in body.items() if value is not None}


def check_model_name(name: Any) -> None:
    """Refuse a name that is too long to be repeated in messages, by an InvalidRequestError."""
    if isinstance(name, str) and len(name) > LONGEST_NAME:
        raise refusal("model", f"must have at most {LONGEST_NAME} characters")


def _refuse_many_values(raw: bytes | bytearray) -> None:
    """Refuse too many values before parsing, which takes up to a microsecond and 100 bytes each and blocks other
    threads.
    """
    text = raw.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in raw else raw
    values = containers = members = strings = at = 0
    while at < len(text):
        start = text.find(b'"', at)
        start = len(text) if start < 0 else start
        inside = text.count(b"[", at, start) + text.count(b"{", at, start)
        containers += inside
        values += inside + text.count(b",", at, start)
        members += text.count(b":", at, start)
        strings += 1
        if values > MOST_VALUES or containers > MOST_CONTAINERS or max(members, strings - values) > MOST_MEMBERS:
            limits = f"{MOST_VALUES} values, {MOST_CONTAINERS} arrays and objects, or {MOST_MEMBERS} members of objects"
            raise ApiError(400, f"The body holds more than {limits}.", code="invalid_value")
        end = text.find(b'"', start + 1)
        at = end + 1 if end >= 0 else len(text)


def validate(model: type[Model], body: dict[str, Any]) -> Model:
    """Return the body as its model.

    Raises:
        InvalidRequestError: names the first field at fault. Fields that hold many values stop at the first wrong one,
            because each error is made before one of them can be read.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = _path(first["loc"])
        message = first["msg"].removeprefix("Value error, ").removeprefix(f"{field} ")
        is_shown = first["type"] == "missing" or isinstance(first["input"], dict | list) or ", got " in message
        given = "" if is_shown else f" (got {first['input']!r:.60})"
        raise refusal(field, f"{message}{given}") from error


def _path(loc: Sequence[int | str]) -> str:
    """Return ('messages', 0, 'role') as messages[0].role."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


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


async def _models(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


ModelsDep = Annotated[Models, Depends(_models)]


async def _service(models: ModelsDep, model: str | None = None) -> Service:
    """Return the model that the query names, if it is in memory. For requests without a body."""
    return models.in_memory(model)


ServiceDep = Annotated[Service, Depends(_service)]


async def _model_of_body(request: Request, models: ModelsDep) -> AsyncIterator[Service]:
    """Load the model that the body names and return it. For requests with a body, which is read already.

    It is not unloaded before the response is over.
    """
    body, name = request.scope["body"]
    entry = models.find(name)
    async with models.use(entry):
        if entry.service is None and getattr(body, "stream", False):
            await while_connected(request, models.start_loading(entry))
            raise StillLoadingError(models, entry)
        if entry.service is None:
            await while_connected(request, models.load(entry))
        assert entry.service is not None
        yield entry.service


ModelDep = Annotated[Service, Depends(_model_of_body)]
"""Declare after the body dependency, so that an invalid request never loads a model."""


def body_of(
    model: type[Model], check: Callable[[dict[str, Any]], None] = lambda body: None
) -> Callable[..., Awaitable[Model]]:
    """Return a dependency that reads a JSON body whatever its content type is (`curl -d` calls JSON a form).

    Args:
        check: sees the raw body first, and raises InvalidRequestError on what the dialect refuses by name.
    """

    def check_body(models: Models, raw: bytes | bytearray, encoding: str) -> tuple[Model, Any]:
        given = parse_json(decompress(raw, encoding, BODY_LIMIT))
        models.find(given.get("model"))
        check(given)
        return validate(model, given), given.get("model")

    async def parse(request: Request, models: ModelsDep) -> Model:
        if "body" in request.scope:  # the request has waited for its model
            known: Model = request.scope["body"][0]
            return known
        raw = await read_body(request, BODY_LIMIT)
        encoding = request.headers.get("content-encoding", "")
        large = len(raw) > SMALL or bool(encoding)
        request.scope["body"] = await models.state.convert(partial(check_body, models, raw, encoding), large)
        body: Model = request.scope["body"][0]
        return body

    parse.body_model = model  # type: ignore[attr-defined] # for the API's document
    return parse
