"""The ASGI application: its routers, its middleware in order, CORS and telemetry."""

from __future__ import annotations

from functools import cache, partial

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from .. import __version__
from ..anthropic import messages
from ..http import errors
from ..http.access_log import AccessLogMiddleware
from ..http.auth import AuthMiddleware
from ..http.limits import RequestLimitMiddleware
from ..http.paths import HeadMiddleware, PathMiddleware
from ..models.loading_stream import StillLoadingError, answer_when_loaded
from ..models.pool import Models
from ..openai import chat, completions, decisions, responses
from ..openai import models as model_list
from ..routes import page, prompts, status
from ..routes.openapi_document import openapi_document


def create_app(models: Models) -> FastAPI:
    """Return the ASGI application of one model or several. `app.state.models.state.stop()` ends all answers."""
    settings = models.state.settings
    app = FastAPI(
        title="mlx-specprefill",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"auto_configure": False, "tracing": False, "metrics": False, "logs": False},
    )
    app.state.models = models
    errors.install(app)
    app.add_exception_handler(StillLoadingError, answer_when_loaded)  # type: ignore[arg-type] # of that exception alone
    app.add_middleware(RequestLimitMiddleware, state=models.state, settings=settings)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(AuthMiddleware, settings=settings)
    if settings.cors_origins:  # outside of AuthMiddleware: a preflight has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
        )
    app.add_middleware(AccessLogMiddleware)
    app.add_middleware(PathMiddleware)
    modules = (page, status, prompts, chat, completions, responses, decisions, messages, model_list)
    routers = [module.router for module in modules]
    for router in routers:
        app.include_router(router)
    app.openapi = cache(partial(openapi_document, app, routers))  # type: ignore[method-assign]
    return app
