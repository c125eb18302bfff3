"""GET /health and HEAD /: the state of the process and of the engine's thread."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ..deps import ModelsDep
from ..errors import RETRY_AFTER_S, ApiError, JsonResponse
from ..hosting.models import Models

__all__ = ["router"]

router = APIRouter()

STALE_AFTER_S = 600.0  # seconds without a step of the engine


@router.head("/")
async def probe() -> Response:
    """Answer a probe, which some clients send first."""
    return Response()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(models: ModelsDep) -> Response:
    """Return 200 while the engines step, 503 when a thread of the engine or the prompts is dead or silent."""
    services = [entry.service for entry in models if entry.service is not None]
    states = [service.engine.health() for service in services]
    workers = [service.prompts.workers for service in services]
    body: dict[str, Any] = {
        "status": "ok",
        "model": models.default.id,
        "running": sum(state.running for state in states),
        "queued": sum(state.queued for state in states),
        "background": any(state.background for state in states),
        "heartbeat_age_s": round(max((state.heartbeat_age_s for state in states), default=0.0), 3),
        "prompts_waiting": sum(one.waiting for one in workers),
        "prompts_longest_s": round(max((one.longest_s for one in workers), default=0.0), 3),
    }
    if models.several:
        body["models"] = {entry.id: entry.state for entry in models}
    trouble = _trouble(models)
    if trouble is None:
        return JsonResponse(body)
    error = ApiError(503, trouble, code="engine_unavailable")
    return JsonResponse(body | {"status": "error"} | error.body(), 503, headers={"Retry-After": RETRY_AFTER_S})


def _trouble(models: Models) -> str | None:
    """Return the problem, None without one. The limit on silence is generous: a single long step is no problem."""
    if (lost := models.lost) is not None:
        return lost  # also on a server that then ends
    if models.state.draining:
        return "the server is shutting down"
    for service in (entry.service for entry in models):
        if service is None:
            continue
        state = service.engine.health()
        if not state.alive:
            return "the engine's thread is dead"
        if state.heartbeat_age_s > STALE_AFTER_S:
            return f"the engine has been silent for {state.heartbeat_age_s:.0f} s"
        if service.prompts.workers.longest_s > STALE_AFTER_S:
            return f"a prompt has been rendered and tokenized for {service.prompts.workers.longest_s:.0f} s"
    return None
