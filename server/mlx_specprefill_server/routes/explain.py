"""POST /v1/specprefill/explain: the kept chunks of a prompt and the reasons. Nothing is generated."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from mlx_specprefill import GenerationRequest, InvalidRequestError, SparseUnsupportedError, as_token_ids

from ..answering import max_tokens_within
from ..auth import IdentityDep
from ..deps import ModelDep, Service, body_of, close_on_disconnect, while_connected
from ..errors import ApiError, JsonResponse
from ..explaining.explained import explain_chunks, explanation
from ..fields import SpecPrefillFields, TokenIds
from ..prompting.prompt import Prompt
from .tokens import Rendered

__all__ = ["router"]

router = APIRouter()


class ExplainRequest(Rendered, SpecPrefillFields):
    """The body: `messages` or `prompt`, and the options of sparse prefill."""

    prompt: str | TokenIds | None = None


def _one_prompt(body: Mapping[str, Any]) -> None:
    if ("messages" in body) == ("prompt" in body):
        field = "prompt" if "prompt" in body else "messages"
        raise InvalidRequestError("exactly one of messages and prompt is needed", field=field)


@router.post("/v1/specprefill/explain")
async def explain(
    request: Request,
    identity: IdentityDep,
    body: Annotated[ExplainRequest, Depends(body_of(ExplainRequest, _one_prompt))],
    service: ModelDep,
) -> Response:
    """Score the prompt with the draft. The target does not run."""
    field = "messages" if body.prompt is None else "prompt"
    prompt = await while_connected(request, _prompt(service, body))
    if not prompt.tokens.size:
        raise InvalidRequestError(f"{field}: the prompt has no tokens", field=field)
    max_tokens_within(len(prompt.tokens), 1, service.context_length, field)
    asked = GenerationRequest(prompt.tokens, 1, specprefill=body.options(), spans=prompt.spans)
    work = service.inspect(asked, identity, body.cache_salt)
    try:
        inspection = await close_on_disconnect(request, work, work.result())
    except SparseUnsupportedError as error:
        raise ApiError(400, f"Nothing to explain: {error}", code="sparse_unsupported") from error
    texts = partial(explain_chunks, service.engine.pair.tokenizer, prompt.tokens, inspection)
    chunks = await while_connected(request, service.prompts.run(texts))
    names = {"object": "specprefill.explanation", "model": service.model_id, "draft": service.draft_id}
    return JsonResponse(names | explanation(inspection, chunks) | {"tokens": prompt.tokens.tolist()})


async def _prompt(service: Service, body: ExplainRequest) -> Prompt:
    if body.prompt is None:
        return await service.prompts.chat(body.conversation())
    if isinstance(body.prompt, str):
        return await service.prompts.raw(body.prompt)
    return Prompt(as_token_ids(body.prompt))
