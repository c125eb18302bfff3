"""Dependencies that the endpoints share: the service behind the app, the request body, and the watch on the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from mlx_specprefill import EngineClosedError, RequestCancelled

from .explaining.inspection import RunningInspection
from .generating.generation import Generation
from .hosting.models import Models
from .hosting.waiting import StillLoadingError
from .request_body import BODY_LIMIT, SMALL, client_left, decompress, parse_json, read_body, validate
from .service import Service, current_deadline

__all__ = [
    "ModelDep",
    "ModelsDep",
    "Service",
    "ServiceDep",
    "body_of",
    "close_on_disconnect",
    "while_connected",
]

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


async def _models(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


ModelsDep = Annotated[Models, Depends(_models)]


async def _service(models: ModelsDep, model: str | None = None) -> Service:
    """Return the model that the query names, if it is in memory. For requests without a body."""
    return models.shown(model)


ServiceDep = Annotated[Service, Depends(_service)]


async def _model_of_body(request: Request, models: ModelsDep) -> AsyncIterator[Service]:
    """Load the model that the body names and return it. For requests with a body, which is read already.

    It is not unloaded before the response is over.
    """
    body, name = request.scope["body"]
    entry = models.find(name)
    async with models.use(entry):
        if entry.service is None and getattr(body, "stream", False):
            await while_connected(request, models.begin(entry))
            raise StillLoadingError(models, entry)
        if entry.service is None:
            await while_connected(request, models.loaded(entry))
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

    def checked(models: Models, raw: bytes | bytearray, encoding: str) -> tuple[Model, Any]:
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
        request.scope["body"] = await models.state.convert(partial(checked, models, raw, encoding), large)
        body: Model = request.scope["body"][0]
        return body

    parse.body_model = model  # type: ignore[attr-defined] # for the API's document
    return parse


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it as soon as the client hangs up.

    Raises:
        ClientDisconnect: the client left.
        DeadlineError: the request has no time left.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(client_left(request.receive))
    deadline = current_deadline()
    left = None if deadline is None else deadline[0] - asyncio.get_running_loop().time()
    try:
        await asyncio.wait((task, watch), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect if deadline is None or watch.done() else deadline[1]
        return await task
    finally:
        task.cancel()
        watch.cancel()


async def close_on_disconnect(request: Request, generation: Generation | RunningInspection, work: Awaitable[T]) -> T:
    """Await `work`, and close its generation as soon as the client hangs up.

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


async def _until_disconnect(request: Request, generation: Generation | RunningInspection) -> None:
    await client_left(request.receive)
    generation.close()
