"""GET /v1/models: the one model that is loaded, and whether it can be prefilled sparsely."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ..deps import Service, ServiceDep
from ..errors import ApiError, JsonResponse

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/models")
async def list_models(service: ServiceDep) -> Response:
    """The loaded model as a list of one."""
    return JsonResponse({"object": "list", "data": [_model(service)]})


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, service: ServiceDep) -> Response:
    """The loaded model, by its id."""
    if model_id != service.model_id:
        message = f"The model {model_id!r} is not loaded; {service.model_id!r} is."
        raise ApiError(404, message, param="model", code="model_not_found")
    return JsonResponse(_model(service))


def _model(service: Service) -> dict[str, Any]:
    length = service.context_length
    return {
        "id": service.model_id,
        "object": "model",
        "created": service.started,
        "owned_by": "mlx-specprefill",
        "max_model_len": length,
        "context_length": length,
        "context_window": length,
        "meta": {"n_ctx": length, "n_ctx_train": length},
        "draft": service.draft_id,
        "specprefill": _specprefill(service),
    }


def _specprefill(service: Service) -> dict[str, Any]:
    pair = service.engine.pair
    reason = pair.sparse_refusal or ("no draft model is loaded" if pair.draft_id is None else None)
    return {"available": reason is None, "reason": reason}
