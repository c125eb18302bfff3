"""GET /health and HEAD /: is the process there, and does the engine's thread still move?"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ..deps import Service, ServiceDep
from ..errors import RETRY_AFTER_S, ApiError, JsonResponse

__all__ = ["router"]

router = APIRouter()


@router.head("/")
async def probe() -> Response:
    """Some clients ask this before anything else."""
    return Response()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(service: ServiceDep) -> Response:
    """200 while the engine moves; 503 when its thread is dead, or it or one for prompts is silent for too long."""
    state, workers = service.engine.health(), service.prompts.workers
    body: dict[str, Any] = {
        "status": "ok",
        "model": service.model_id,
        "running": state.running,
        "queued": state.queued,
        "heartbeat_age_s": round(state.heartbeat_age_s, 3),
        "prompts_waiting": workers.waiting,
        "prompts_longest_s": round(workers.longest_s, 3),
    }
    trouble = _trouble(service)
    if trouble is None:
        return JsonResponse(body)
    error = ApiError(503, trouble, code="engine_unavailable")
    return JsonResponse(body | {"status": "error"} | error.body(), 503, headers={"Retry-After": RETRY_AFTER_S})


def _trouble(service: Service) -> str | None:
    """A single long step is not trouble, which is why the limit on silence is generous."""
    if service.draining:
        return "the server is shutting down"
    state = service.engine.health()
    if not state.alive:
        return "the engine's thread is dead"
    if state.heartbeat_age_s > service.settings.stale_after_s:
        return f"the engine has been silent for {state.heartbeat_age_s:.0f} s"
    if service.prompts.workers.longest_s > service.settings.stale_after_s:
        return f"a prompt has been rendered and tokenized for {service.prompts.workers.longest_s:.0f} s"
    return None
