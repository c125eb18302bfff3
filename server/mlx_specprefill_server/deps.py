"""What every endpoint shares: the service behind the app, the request body, and the watch on the client."""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import PurePath
from typing import Annotated, Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import orjson
from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from mlx_specprefill import Constraint, EngineClosedError, GenerationRequest, InvalidRequestError, RequestCancelled

from .errors import ApiError
from .explaining.inspecting import Inspecting
from .generating.deliveries import Deliveries
from .generating.generation import Ended, EngineLike, Generation, Job
from .generating.vocabulary import Vocabulary
from .monitoring.access_log import current_exchange
from .monitoring.metrics import Metrics
from .monitoring.recent import RecentAnswers
from .parsers.formats import detect
from .prompting.prompt import PromptBuilder
from .settings import Settings

__all__ = ["Service", "ServiceDep", "body_of", "unless_client_leaves"]

REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+")

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


class Service:
    """Engine, tokenizer and settings as one application uses them."""

    def __init__(self, engine: EngineLike, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.vocabulary = Vocabulary(engine.pair.tokenizer)
        self.prompts = PromptBuilder(engine.pair.tokenizer)
        self.metrics = Metrics(engine, self.model_id)
        self.recent = RecentAnswers()
        self.format = detect(engine.pair.tokenizer, settings.tool_parser, settings.reasoning_parser)
        self.started = int(time.time())
        self._live: WeakSet[Generation | Inspecting] = WeakSet()
        self._deliveries: WeakKeyDictionary[asyncio.AbstractEventLoop, Deliveries] = WeakKeyDictionary()
        self.stopping = False

    @property
    def context_length(self) -> int:
        length: int = self.engine.pair.context_length
        return length

    @property
    def model_id(self) -> str:
        """An alias, never a path of this machine."""
        return self.settings.model_alias or _short(self.engine.pair.target_id) or "default"

    @property
    def draft_id(self) -> str | None:
        """None: no draft is loaded."""
        return _short(self.engine.pair.draft_id)

    async def compile(self, constraint: Constraint | None) -> None:
        """Compile a grammar before `submit` needs it, on the worker that has the tokenizer to itself.

        Raises:
            InvalidRequestError: what is wrong with the grammar.
        """
        if constraint is not None:
            await self.prompts.run(partial(self.engine.compile, constraint))

    def submit(self, jobs: Sequence[Job]) -> Generation:
        """Starts all jobs.

        Raises:
            EngineClosedError: shutting down, or the engine takes nothing more.
        """
        self._refuse_when_stopping()
        loop = asyncio.get_running_loop()
        deliveries = self._deliveries.setdefault(loop, Deliveries(loop))
        generation = Generation(self.engine, self.vocabulary, jobs, deliveries, self._counted(len(jobs)))
        self._live.add(generation)
        return generation

    def inspect(self, request: GenerationRequest) -> Inspecting:
        """Starts an inspection; raises as `submit`."""
        self._refuse_when_stopping()
        work = Inspecting(self.engine, request)
        self._live.add(work)
        return work

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise EngineClosedError("the server is shutting down")

    def _counted(self, answers: int) -> Callable[[Ended], None]:
        """Tells the metrics and the request's line in the log how answers ended."""
        exchange = current_exchange()
        if exchange is not None:
            exchange.running += answers

        def ended(end: Ended) -> None:
            self.metrics.ended(end)
            self.recent.add(end, None if exchange is None else exchange.id)
            if exchange is not None:
                exchange.ended(end)

        return ended

    def stop(self) -> None:
        """Ends every answer in work, so that each stream can close properly, and takes no new ones."""
        self.stopping = True
        for work in list(self._live):
            work.stop(self.settings.shutdown_grace_s / 2)


def _short(model: str | None) -> str | None:
    """`org/name` and plain names as they are; of a path only its end."""
    if model is None or REPOSITORY.fullmatch(model):
        return model
    return PurePath(model).name


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]


def body_of(model: type[Model], check: Callable[[dict[str, Any]], None]) -> Callable[..., Awaitable[Model]]:
    """A dependency that reads a JSON body whatever its content type says (`curl -d` calls JSON a form).

    Args:
        check: sees the raw body first, and raises InvalidRequestError on what the dialect refuses by name.
    """

    async def parse(request: Request, service: ServiceDep) -> Model:
        limit = service.settings.body_limit
        raw = _decoded(await _read(request, limit), request.headers.get("content-encoding", ""), limit)
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from error
        if not isinstance(body, dict):
            raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
        _refuse_depths(body)
        given = {name: value for name, value in body.items() if value is not None}  # null means default
        _check_model(service, given.get("model"))
        check(given)
        return _validated(model, given)

    parse.body_model = model  # type: ignore[attr-defined] # for the API's document
    return parse


def _refuse_depths(body: dict[str, Any]) -> None:
    """What comes in may have to go out again, a little deeper, and orjson writes a quarter of the levels it reads."""
    try:
        orjson.dumps([[[[body]]]])
    except TypeError as error:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from error


def _check_model(service: Service, name: Any) -> None:
    """Any name will do, unless the settings say otherwise: clients call the one model what they like."""
    if service.settings.strict_model and name is not None and name != service.model_id:
        message = f"The model {name!r:.100} is not loaded; {service.model_id!r} is."
        raise ApiError(404, message, param="model", code="model_not_found")


async def _read(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")


def _decoded(body: bytes, encoding: str, limit: int) -> bytes:
    """A body that may be compressed; what it becomes is held to the same limit."""
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


def _validated(model: type[Model], body: dict[str, Any]) -> Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = _path(first["loc"])
        message = first["msg"].removeprefix("Value error, ").removeprefix(f"{field} ")
        told = first["type"] == "missing" or isinstance(first["input"], dict | list) or ", got " in message
        given = "" if told else _shown(first["input"])
        raise InvalidRequestError(f"{field}: {message}{given}", field=field) from error


def _path(loc: Sequence[int | str]) -> str:
    """('messages', 0, 'role') as messages[0].role."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _shown(value: Any) -> str:
    return f" (got {value!r:.60})"


async def unless_client_leaves(request: Request, generation: Generation | Inspecting, work: Awaitable[T]) -> T:
    """Awaits `work`, and closes its generation as soon as the client hangs up.

    Raises:
        ClientDisconnect: the client left.
    """
    watch = asyncio.create_task(_until_disconnect(request, generation))
    try:
        return await work
    except (EngineClosedError, RequestCancelled) as error:
        if watch.done():
            raise ClientDisconnect from error
        raise
    finally:
        watch.cancel()
        generation.close()


async def _until_disconnect(request: Request, generation: Generation | Inspecting) -> None:
    """The body has been read, so the next message can only be the disconnect."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    generation.close()
