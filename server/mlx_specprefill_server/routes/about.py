"""/metrics, /version, and llama.cpp's /props and /slots."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0
from starlette.responses import Response

from .. import __version__
from ..deps import ModelsDep, Service, ServiceDep
from ..errors import RETRY_AFTER_S, ApiError, JsonResponse
from ..monitoring.metrics import text_of_several

__all__ = ["router"]

router = APIRouter()


@router.get("/metrics")
async def metrics(models: ModelsDep) -> Response:
    """Return counts and times in Prometheus' text format, with each model's name if there are several."""
    every = [entry.metrics for entry in models]
    text = text_of_several(every) if models.several else every[0].text()
    return Response(text, media_type=CONTENT_TYPE_PLAIN_1_0_0)


@router.get("/version")
async def version() -> Response:
    """Return the server's version in vLLM's form."""
    return JsonResponse({"version": __version__})


@router.get("/props")
async def props(service: ServiceDep) -> Response:
    """Return the model's limits and its chat template, in llama.cpp's shape."""
    tokenizer = service.engine.pair.tokenizer
    body = {
        "default_generation_settings": {
            "n_ctx": service.context_length,
            "params": {"temperature": service.settings.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        },
        "total_slots": service.engine.stats().max_rows,
        "model_alias": service.model_id,
        "model_path": service.model_id,  # not a path: clients learn nothing of this machine's files
        "modalities": {"vision": False, "audio": False},
        "chat_template": str(tokenizer.chat_template or ""),
        "bos_token": tokenizer.bos_token or "",
        "eos_token": tokenizer.eos_token or "",
        "build_info": f"mlx-specprefill-{__version__}",
        "is_sleeping": False,
    }
    return JsonResponse(body)


@router.get("/slots")
async def slots(service: ServiceDep, fail_on_no_slot: str = "") -> Response:
    """Return one entry per concurrent request, in llama.cpp's shape, without any text of the requests.

    `?fail_on_no_slot=1` answers 503 while all are taken.
    """
    stats = service.engine.stats()
    busy = stats.prefilling + stats.decoding
    if fail_on_no_slot and busy >= stats.max_rows:
        raise ApiError(503, "no slot is free", code="engine_unavailable", headers={"Retry-After": RETRY_AFTER_S})
    return JsonResponse([_slot(service, number, number < busy) for number in range(stats.max_rows)])


def _slot(service: Service, number: int, busy: bool) -> dict[str, Any]:
    return {"id": number, "n_ctx": service.context_length, "speculative": False, "is_processing": busy}
