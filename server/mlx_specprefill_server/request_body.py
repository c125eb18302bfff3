"""Request bodies, read in bounded time: one that is too large, no JSON or has a wrong field is refused."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from .big_json import loads
from .http.errors import ApiError, refusal
from .models.dependencies import ModelsDep
from .models.pool import Models

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
        ApiError: 413, as soon as it is known to be longer than `limit` bytes; 503: there is no room for it.
    """
    announced = request.headers.get("content-length", "")
    body = bytearray()
    if announced.isdigit() and len(announced) < 20 and int(announced) > limit:
        raise _too_large(limit)
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
        request.scope["body_place"].grow(len(body))
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
        raise ApiError(400, "The body must be one gzip stream, with nothing after it.", code="invalid_json")
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
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
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


def body_of(
    model: type[Model], check: Callable[[dict[str, Any]], None] = lambda body: None
) -> Callable[..., Awaitable[Model]]:
    """Return a dependency that reads a JSON body whatever its content type is (`curl -d` calls JSON a form).

    Args:
        check: sees the raw body first, and raises InvalidRequestError on what the dialect refuses by name.
    """

    def check_body(models: Models, raw: bytes | bytearray) -> tuple[Model, Any]:
        given = parse_json(raw)
        models.find(given.get("model"))
        check(given)
        return validate(model, given), given.get("model")

    async def parse(request: Request, models: ModelsDep) -> Model:
        if "body" in request.scope:  # the request has waited for its model
            known: Model = request.scope["body"][0]
            return known
        raw: bytes | bytearray = await read_body(request, BODY_LIMIT)
        if encoding := request.headers.get("content-encoding", ""):
            raw = await models.state.convert(partial(decompress, raw, encoding, BODY_LIMIT), True)
            request.scope["body_place"].grow(len(raw))
        request.scope["body"] = await models.state.convert(partial(check_body, models, raw), len(raw) > SMALL)
        body: Model = request.scope["body"][0]
        return body

    parse.body_model = model  # type: ignore[attr-defined] # for the API's document
    return parse
