"""The server's state: health, metrics, version, props, live statistics, verdicts, cached prompts, their deletion."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0
from starlette.responses import Response, StreamingResponse

from mlx_specprefill import CacheEntry

from .. import __version__
from ..http.auth import Identity, IdentityDep
from ..http.errors import RETRY_AFTER_S, ApiError, JsonResponse
from ..http.event_stream import EVENT_STREAM_HEADERS, data_event
from ..models.dependencies import ModelsDep
from ..models.pool import Models
from ..monitoring.metrics import metrics_text

router = APIRouter()

STALE_AFTER_S = 600.0  # seconds without a step of the engine

Interval = Annotated[float, Query(ge=0.2, le=5)]  # seconds; a stream stops within one of them when the server stops


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
        "prompts_waiting": sum(pool.waiting for pool in workers),
        "prompts_longest_s": round(max((pool.longest_s for pool in workers), default=0.0), 3),
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


@router.get("/metrics")
async def metrics(models: ModelsDep) -> Response:
    """Return counts and times in Prometheus' text format, with each model's name."""
    return Response(metrics_text(entry.metrics for entry in models), media_type=CONTENT_TYPE_PLAIN_1_0_0)


@router.get("/version")
async def version() -> Response:
    """Return the server's version in vLLM's form."""
    return JsonResponse({"version": __version__})


@router.get("/props")
async def props(models: ModelsDep, model: str | None = None) -> Response:
    """Return the window and the chat template where llama.cpp's clients read them."""
    service = models.in_memory(model)
    tokenizer = service.engine.pair.tokenizer
    body = {
        "default_generation_settings": {"n_ctx": service.context_length},
        "total_slots": service.engine.stats().max_rows,
        "model_alias": service.model_id,
        "model_path": service.model_id,  # not a path: clients learn nothing of this machine's files
        "modalities": {"vision": False, "audio": False},
        "chat_template": str(tokenizer.chat_template or ""),
        "bos_token": tokenizer.bos_token or "",
        "eos_token": tokenizer.eos_token or "",
        "build_info": f"mlx-specprefill-{__version__}",
    }
    return JsonResponse(body | models.warnings_of(model))


@router.get("/v1/specprefill/stats")
async def stats(models: ModelsDep, identity: IdentityDep, model: str | None = None) -> Response:
    """Return the current statistics."""
    return JsonResponse(_snapshot(models, model, identity))


@router.get(
    "/v1/specprefill/stats/stream", include_in_schema=False
)  # the stream has no end, which no description can express
async def stream(
    models: ModelsDep, identity: IdentityDep, interval: Interval = 1.0, model: str | None = None
) -> Response:
    """Send the statistics every `interval` seconds, as server-sent events."""
    models.in_memory(model)
    return StreamingResponse(
        _snapshots(models, model, identity, interval), media_type="text/event-stream", headers=EVENT_STREAM_HEADERS
    )


@router.get("/v1/specprefill/verdicts")
async def verdicts(models: ModelsDep, identity: IdentityDep) -> Response:
    """Return the verdicts on this API key's last sparse answers, newest first, and counts since the start."""
    known, visible = models.state.verdicts, identity.visible_answers
    answers = [answer.to_dict() for answer in known.newest_first(visible)]
    return JsonResponse({"object": "list", "data": answers, "counts": known.counts(visible)})


@router.get("/v1/specprefill/verdicts/{request_id}")
async def verdicts_of(models: ModelsDep, identity: IdentityDep, request_id: str) -> Response:
    """Return the verdicts on the answers to one request of this API key."""
    newest = models.state.verdicts.newest_first(identity.visible_answers)
    answers = [answer.to_dict() for answer in newest if answer.request_id == request_id]
    if not answers:
        message = f"None of the last sparse answers belongs to the request {request_id!r:.80}."
        raise ApiError(404, message, param="request_id", code="not_found")
    return JsonResponse({"object": "list", "data": answers})


@router.get("/v1/specprefill/cache")
async def cached(models: ModelsDep, identity: IdentityDep, model: str | None = None) -> Response:
    """Return the cached prompts of this API key. Ids are digests and reveal no text."""
    entries = await asyncio.to_thread(models.in_memory(model).engine.cached, identity.visible_cache)
    body = {"object": "list", "data": [_entry(entry) for entry in entries]}
    return JsonResponse(body | models.warnings_of(model))


@router.delete("/v1/specprefill/cache")
async def drop_all(models: ModelsDep, identity: IdentityDep, model: str | None = None) -> Response:
    """Forget all prompts of this API key, of one model or of all, in memory or not."""
    models.state.forget(identity.visible_answers)
    await models.forget(model, identity.visible_cache)
    return JsonResponse({"deleted": True} | models.warnings_of(model))


@router.delete("/v1/specprefill/cache/{entry_id}")
async def drop(models: ModelsDep, identity: IdentityDep, entry_id: str, model: str | None = None) -> Response:
    """Drop one cached prompt, in memory and on disk."""
    if not await asyncio.to_thread(models.in_memory(model).engine.drop_cached, entry_id, identity.visible_cache):
        raise ApiError(404, f"There is no cached prompt with the id {entry_id!r:.80}.", param="id", code="not_found")
    return JsonResponse({"id": entry_id, "deleted": True} | models.warnings_of(model))


async def _snapshots(models: Models, name: str | None, identity: Identity, interval: float) -> AsyncIterator[bytes]:
    """Look the model up for each event: a stream of hours must not keep a model in memory."""
    while not models.state.stopping:
        try:
            yield data_event(_snapshot(models, name, identity))
        except ApiError as error:
            yield data_event({"object": "specprefill.stats", "time": round(time.time(), 3), **error.body()})
        await asyncio.sleep(interval)


def _snapshot(models: Models, name: str | None, identity: Identity) -> dict[str, Any]:
    service = models.in_memory(name)
    health, now = service.engine.health(), asdict(service.engine.stats())
    memory = now.pop("memory")
    numbers = {name: round(value, 3) if isinstance(value, float) else value for name, value in now.items()}
    return {
        "object": "specprefill.stats",
        "time": round(time.time(), 3),
        "started": service.state.started,
        "model": service.model_id,
        "draft": service.draft_id,
        "scores_itself": service.engine.pair.scores_itself,
        "context_length": service.context_length,
        "alive": health.alive,
        "heartbeat_age_s": round(health.heartbeat_age_s, 3),
        **numbers,
        "memory": memory,
        "running": [line.to_dict() for line in service.state.running(identity.visible_answers)],
        "verdicts": service.state.verdicts.counts(identity.visible_answers),
        "recent": service.state.recent.newest_first(identity.visible_answers),
        **models.warnings_of(name),
    }


def _entry(entry: CacheEntry) -> dict[str, Any]:
    """Return an entry without its label, which would reveal its owner."""
    return {name: value for name, value in asdict(entry).items() if name != "label"}
