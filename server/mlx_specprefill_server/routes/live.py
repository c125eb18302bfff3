"""Live statistics, once and as a stream, and the list of cached prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response, StreamingResponse

from mlx_specprefill import CacheEntry

from ..auth import Identity, IdentityDep
from ..deps import ModelsDep, Service, ServiceDep
from ..errors import ApiError, JsonResponse
from ..hosting.models import Models
from ..report import EVENT_STREAM_HEADERS, data_event

__all__ = ["router"]

router = APIRouter(prefix="/v1/specprefill")

Interval = Annotated[float, Query(ge=0.2, le=5)]  # seconds; a stream stops within one of them when the server stops


@router.get("/stats")
async def stats(service: ServiceDep, identity: IdentityDep) -> Response:
    """Return the current statistics."""
    return JsonResponse(_snapshot(service, identity))


@router.get("/stats/stream", include_in_schema=False)  # the stream has no end, which no description can express
async def stream(
    models: ModelsDep, identity: IdentityDep, interval: Interval = 1.0, model: str | None = None
) -> Response:
    """Send the statistics every `interval` seconds, as server-sent events."""
    models.shown(model)
    return StreamingResponse(
        _snapshots(models, model, identity, interval), media_type="text/event-stream", headers=EVENT_STREAM_HEADERS
    )


@router.get("/cache")
async def cached(service: ServiceDep, identity: IdentityDep) -> Response:
    """Return the cached prompts of this API key. Ids are digests and reveal no text."""
    entries = await asyncio.to_thread(service.engine.cached, identity.visible_cache)
    return JsonResponse({"object": "list", "data": [_entry(entry) for entry in entries]})


@router.delete("/cache")
async def drop_all(service: ServiceDep, identity: IdentityDep) -> Response:
    """Drop all cached prompts of this API key."""
    await asyncio.to_thread(service.engine.drop_cached, None, identity.visible_cache)
    return JsonResponse({"deleted": True})


@router.delete("/cache/{entry_id}")
async def drop(service: ServiceDep, identity: IdentityDep, entry_id: str) -> Response:
    """Drop one cached prompt, in memory and on disk."""
    if not await asyncio.to_thread(service.engine.drop_cached, entry_id, identity.visible_cache):
        raise ApiError(404, f"There is no cached prompt with the id {entry_id!r:.80}.", param="id", code="not_found")
    return JsonResponse({"id": entry_id, "deleted": True})


async def _snapshots(models: Models, model: str | None, identity: Identity, interval: float) -> AsyncIterator[bytes]:
    while not models.state.stopping:
        yield data_event(_snapshot_of(models, model, identity))
        await asyncio.sleep(interval)


def _snapshot_of(models: Models, name: str | None, identity: Identity) -> dict[str, Any]:
    """Look the model up and return its statistics. A stream of hours must not keep a model in memory."""
    try:
        return _snapshot(models.shown(name), identity)
    except ApiError as error:
        return {"object": "specprefill.stats", "time": round(time.time(), 3), **error.body()}


def _snapshot(service: Service, identity: Identity) -> dict[str, Any]:
    health, now = service.engine.health(), asdict(service.engine.stats())
    memory = now.pop("memory")
    numbers = {name: round(value, 3) if isinstance(value, float) else value for name, value in now.items()}
    return {
        "object": "specprefill.stats",
        "time": round(time.time(), 3),
        "started": service.state.started,
        "model": service.model_id,
        "draft": service.draft_id,
        "staged": service.engine.pair.stages is not None,
        "context_length": service.context_length,
        "alive": health.alive,
        "heartbeat_age_s": round(health.heartbeat_age_s, 3),
        **numbers,
        "memory": memory,
        "running": [line.to_dict() for line in service.state.running(identity.visible_answers)],
        "recent": service.state.recent.newest_first(identity.visible_answers),
    }


def _entry(entry: CacheEntry) -> dict[str, Any]:
    """Return an entry without its label, which would reveal its owner."""
    return {name: value for name, value in asdict(entry).items() if name != "label"}
