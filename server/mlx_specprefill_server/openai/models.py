"""GET /v1/models: the one model that is loaded, and whether it can be prefilled sparsely."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ..deps import Service, ServiceDep
from ..errors import ApiError, JsonResponse
from ..request_body import check_model_name

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/models")
async def list_models(service: ServiceDep) -> Response:
    """The loaded model as a list of one."""
    model = _model(service)
    page = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}  # Anthropic's
    return JsonResponse({"object": "list", "data": [model], **page})


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, service: ServiceDep) -> Response:
    """The loaded model, by its id."""
    check_model_name(model_id)
    if model_id != service.model_id:
        message = f"The model {model_id!r} is not loaded; {service.model_id!r} is."
        raise ApiError(404, message, param="model", code="model_not_found")
    return JsonResponse(_model(service))


def _model(service: Service) -> dict[str, Any]:
    """OpenAI's object and Anthropic's in one."""
    length = service.context_length
    return {
        "id": service.model_id,
        "object": "model",
        "type": "model",
        "display_name": service.model_id,
        "lifecycle": "active",
        "created": service.started,
        "created_at": datetime.fromtimestamp(service.started, UTC).isoformat(),
        "max_input_tokens": length,
        "owned_by": "mlx-specprefill",
        "max_model_len": length,
        "context_length": length,
        "context_window": length,
        "meta": {"n_ctx": length, "n_ctx_train": service.engine.pair.context_length},
        "origin": service.settings.model_origin,
        "licence": service.settings.model_licence,
        "draft": service.draft_id,
        "draft_tokenizer": _draft_tokenizer(service),
        "specprefill": _specprefill(service),
    }


def _draft_tokenizer(service: Service) -> dict[str, Any] | None:
    """How the draft's tokens and the target's meet."""
    pair = service.engine.pair
    if pair.draft_id is None:
        return None
    if pair.mapping is None:
        return {"kind": "same tokenizer", "aligned": 1.0}
    return {"kind": "mapped by text", "aligned": round(pair.mapping.aligned, 6)}


def _specprefill(service: Service) -> dict[str, Any]:
    pair = service.engine.pair
    reason = pair.sparse_refusal or ("no draft model is loaded" if pair.draft_id is None else None)
    return {"available": reason is None, "reason": reason}
