"""The model of a request, as a dependency of endpoints: loaded first if the request has a body."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Request

from ..http.while_connected import while_connected
from .loading_stream import StillLoadingError
from .pool import Models
from .service import Service


async def _models(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


ModelsDep = Annotated[Models, Depends(_models)]


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
