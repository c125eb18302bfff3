"""The application over one started engine, as `serve` makes it."""

from __future__ import annotations

from fastapi import FastAPI

from mlx_specprefill import Engine
from mlx_specprefill_server.models.pool import Models
from mlx_specprefill_server.models.service import Service
from mlx_specprefill_server.running.app import create_app
from mlx_specprefill_server.settings.server import Settings


def app_over(engine: Engine, settings: Settings) -> FastAPI:
    return create_app(Models.of(Service(engine, settings)))
