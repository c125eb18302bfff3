"""What the server is doing now: /v1/specprefill/stats, the same as a stream, and what it keeps for later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response, StreamingResponse

from mlx_specprefill import CachedTokens

from ..callers import Caller, CallerDep
from ..deps import Service, ServiceDep
from ..errors import ApiError, JsonResponse
from ..sse import EVENT_STREAM_HEADERS, data

__all__ = ["router"]

router = APIRouter(prefix="/v1/specprefill")

Interval = Annotated[float, Query(ge=0.2, le=5)]  # seconds; a stream notices within one that the server stops


@router.get("/stats")
async def stats(service: ServiceDep, caller: CallerDep) -> Response:
    """One moment."""
    return JsonResponse(_snapshot(service, caller))


@router.get("/stats/stream", include_in_schema=False)  # it has no end, which no description can say
async def stream(service: ServiceDep, caller: CallerDep, interval: Interval = 1.0) -> Response:
    """The same again and again, as server-sent events."""
    return StreamingResponse(
        _snapshots(service, caller, interval), media_type="text/event-stream", headers=EVENT_STREAM_HEADERS
    )


@router.get("/cache")
async def cached(service: ServiceDep, caller: CallerDep) -> Response:
    """What is kept for the caller's later requests; ids are digests and say nothing of the text."""
    entries = await asyncio.to_thread(service.engine.cached, caller.cached)
    return JsonResponse({"object": "list", "data": [_entry(entry) for entry in entries]})


@router.delete("/cache")
async def drop_all(service: ServiceDep, caller: CallerDep) -> Response:
    """Forgets everything that is kept for the caller."""
    await asyncio.to_thread(service.engine.drop_cached, None, caller.cached)
    return JsonResponse({"deleted": True})


@router.delete("/cache/{entry_id}")
async def drop(service: ServiceDep, caller: CallerDep, entry_id: str) -> Response:
    """Forgets one entry, in memory and on disk."""
    if not await asyncio.to_thread(service.engine.drop_cached, entry_id, caller.cached):
        raise ApiError(404, "Nothing of that id is kept.", param="id", code="not_found")
    return JsonResponse({"id": entry_id, "deleted": True})


async def _snapshots(service: Service, caller: Caller, interval: float) -> AsyncIterator[bytes]:
    while not service.stopping:
        yield data(_snapshot(service, caller))
        await asyncio.sleep(interval)


def _snapshot(service: Service, caller: Caller) -> dict[str, Any]:
    health, now = service.engine.health(), asdict(service.engine.stats())
    memory = now.pop("memory")
    numbers = {name: round(value, 3) if isinstance(value, float) else value for name, value in now.items()}
    return {
        "object": "specprefill.stats",
        "time": round(time.time(), 3),
        "started": service.started,
        "model": service.model_id,
        "draft": service.draft_id,
        "context_length": service.context_length,
        "alive": health.alive,
        "heartbeat_age_s": round(health.heartbeat_age_s, 3),
        **numbers,
        "memory": memory,
        "recent": service.recent.newest_first(caller.answers),
    }


def _entry(entry: CachedTokens) -> dict[str, Any]:
    return asdict(entry)
