"""Reading and checking of a request body, in bounded time and memory whatever its bytes are."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Receive

from mlx_specprefill import InvalidRequestError

from .errors import ApiError

__all__ = [
    "BODY_LIMIT",
    "SMALL",
    "check_model_name",
    "client_left",
    "decompress",
    "parse_json",
    "read_body",
    "validate",
]

Model = TypeVar("Model", bound=BaseModel)

BODY_LIMIT = 32 << 20  # bytes
SMALL = 1 << 16  # bytes of a body that can't exceed the limits below
MOST_VALUES = 1 << 20  # values in one body; also the tokens of the longest prompt that models read today
MOST_CONTAINERS = 1 << 16  # arrays and objects in one body: a conversation has a few per message
MOST_MEMBERS = 1 << 15  # members of all objects in one body; each takes ten times as long to parse as a number
DEEPEST = 250  # levels; a value may be written again, a little deeper, and orjson writes at most 254 levels
LONGEST_NAME = 256  # characters of a model's name, which answers and logs repeat
CONTAINERS = (list, dict)


async def client_left(receive: Receive) -> None:
    """Return when the client has left. The body has been read, so no other message can follow."""
    while (await receive())["type"] != "http.disconnect":
        pass


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
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    _refuse_shapes(body)
    check_model_name(body.get("model"))
    return {name: value for name, value in body.items() if value is not None}


def check_model_name(name: Any) -> None:
    """Refuse a name that is too long to be repeated in messages.

    Raises:
        InvalidRequestError: it is too long to be repeated to anybody.
    """
    if isinstance(name, str) and len(name) > LONGEST_NAME:
        raise InvalidRequestError(f"model: must have at most {LONGEST_NAME} characters", field="model")


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


def _refuse_shapes(body: dict[str, Any]) -> None:
    if next(islice(_levels(body), DEEPEST, None), None):
        raise ApiError(400, f"The body is nested too deeply: more than {DEEPEST} levels.", code="invalid_json")


def _levels(body: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield the arrays and objects of each level of nesting, from the outside in."""
    level: list[Any] = [body]
    while level:
        yield level
        level = [
            value
            for container in level
            for value in (container.values() if isinstance(container, dict) else container)
            if type(value) in CONTAINERS
        ]


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
        told = first["type"] == "missing" or isinstance(first["input"], dict | list) or ", got " in message
        given = "" if told else _shorten(first["input"])
        raise InvalidRequestError(f"{field}: {message}{given}", field=field) from error


def _path(loc: Sequence[int | str]) -> str:
    """Return ('messages', 0, 'role') as messages[0].role."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _shorten(value: Any) -> str:
    return f" (got {value!r:.60})"
