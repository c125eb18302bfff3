"""GET /v1/models: the models, their state and abilities; POST .../load and .../unload."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..http.auth import Identity, IdentityDep
from ..http.errors import ApiError, JsonResponse
from ..http.while_connected import while_connected
from ..models.dependencies import ModelsDep
from ..models.entry import Entry
from ..models.pool import Models
from ..models.service import Service
from ..request_body import check_model_name

router = APIRouter()


@router.get("/v1/models")
async def list_models(models: ModelsDep) -> Response:
    """List every known model, the default one first."""
    listed = [_model(models, entry) for entry in models]
    page = {"has_more": False, "first_id": listed[0]["id"], "last_id": listed[-1]["id"]}  # Anthropic's
    return JsonResponse({"object": "list", "data": listed, **page})


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, models: ModelsDep) -> Response:
    """Return a model by its id or an alias."""
    check_model_name(model_id)
    return JsonResponse(_model(models, models.get(model_id)))


@router.post("/v1/models/{model_id:path}/load")
async def load(request: Request, model_id: str, models: ModelsDep, identity: IdentityDep) -> Response:
    """Bring a model into memory, also if that has failed before. Answer when it is there."""
    entry = _model_to_change(models, model_id, identity)
    async with models.use(entry):
        await while_connected(request, models.reload(entry))
        return JsonResponse(_model(models, entry))


@router.post("/v1/models/{model_id:path}/unload")
async def unload(model_id: str, models: ModelsDep, identity: IdentityDep) -> Response:
    """Unload a model. Refuse while a request uses it."""
    entry = _model_to_change(models, model_id, identity)
    if entry.pin:
        message = f"The model {entry.id!r} stays in memory: its table says pin."
        raise ApiError(409, message, param="model", code="model_pinned")
    if not await models.unload(entry):
        raise ApiError(409, f"The model {entry.id!r} is in use.", param="model", code="model_in_use")
    return JsonResponse(_model(models, entry))


def _model_to_change(models: Models, model_id: str, identity: Identity) -> Entry:
    """Return the model to load or unload.

    Raises:
        ApiError: 404: no such model, or this server has one alone; 403: the key may not.
    """
    check_model_name(model_id)
    entry = models.get(model_id)
    if models.state.settings.admin_keys and not identity.admin:
        raise ApiError(403, "Only an --admin-key loads and unloads models.", code="admin_key_needed")
    if not models.several:
        message = f"This server has one model, {entry.id!r}, from its start to its end; --config names several."
        raise ApiError(409, message, param="model", code="model_pinned")
    return entry


def _model(models: Models, entry: Entry) -> dict[str, Any]:
    """Return OpenAI's object and Anthropic's in one."""
    started = models.state.started
    fields = {
        "id": entry.id,
        "object": "model",
        "type": "model",
        "display_name": entry.id,
        "lifecycle": "active",
        "created": started,
        "created_at": datetime.fromtimestamp(started, UTC).isoformat(),
        "owned_by": "mlx-specprefill",
        "rule": entry.settings.rule,
        "state": entry.state,
        "error": entry.error,
    }
    if models.several:
        fields |= {"aliases": list(entry.aliases), "default": entry is models.default, "pinned": entry.pin}
        fields["loading"] = asdict(entry.progress) if entry.state == "loading" else None
    return fields | (_unknown_fields(entry) if entry.service is None else _in_memory(entry.service))


def _in_memory(service: Service) -> dict[str, Any]:
    length, pair, use = service.context_length, service.engine.pair, service.engine.stats().memory
    weights = use.target_weights + use.draft_weights
    refusal = pair.sparse_refusal or ("no draft model is loaded" if pair.draft_id is None else None)
    return {
        "max_input_tokens": length,
        "max_model_len": length,
        "context_length": length,
        "context_window": length,
        "meta": {"n_ctx": length, "n_ctx_train": pair.context_length},
        "memory": {"weights": weights, "requests": use.requests, "caches": use.prefix_cache},
        "ranks": {"count": 1 if pair.ranks is None else pair.ranks.size, "sharding": pair.sharding},
        "tools": _tools(service),
        "template_kwargs": service.prompts.template_kwargs,
        "sampling": service.sampling,
        "draft": service.draft_id,
        "draft_tokenizer": _draft_tokenizer(service),
        "scorer": _scorer(service),
        "specprefill": {"available": refusal is None, "reason": refusal},
        "estimates": service.engine.estimates._asdict(),
    }


def _tools(service: Service) -> dict[str, Any]:
    """Return what the chat template shows of tools, and the notation in which the model's calls are read."""
    form = service.prompts.forms.get(True)
    return {
        "definitions": service.prompts.takes_tools,
        "calls": form is not None and form.calls != "written",
        "results": form is not None and form.results == "tool",
        "parallel": form is not None and form.calls != "written" and form.parallel,
        "parsed": service.format.notation or "none",
    }


def _unknown_fields(entry: Entry) -> dict[str, Any]:
    """Return the fields that clients look for, of a model that is not in memory. All but its window are None."""
    windows = ("max_input_tokens", "max_model_len", "context_length", "context_window")
    unknown = (
        "memory",
        "ranks",
        "tools",
        "template_kwargs",
        "sampling",
        "draft",
        "draft_tokenizer",
        "scorer",
        "specprefill",
        "estimates",
    )
    return dict.fromkeys(windows, entry.context) | dict.fromkeys(unknown, None)


def _scorer(service: Service) -> str | None:
    """Return the name of the model that scores prompts, None without one."""
    pair = service.engine.pair
    if pair.draft_id is None:
        return None
    return "own first layers" if pair.scores_itself else "draft"


def _draft_tokenizer(service: Service) -> dict[str, Any] | None:
    """Return how the draft's tokens map to the target's."""
    pair = service.engine.pair
    if pair.draft_id is None:
        return None
    if pair.mapping is None:
        return {"kind": "same tokenizer", "aligned": 1.0}
    return {"kind": "mapped by text", "aligned": round(pair.mapping.aligned, 6)}
