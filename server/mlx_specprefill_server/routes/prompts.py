"""Endpoints that render a prompt and generate nothing: /tokenize, /detokenize, /apply-template, explain.

/tokenize, /detokenize and /apply-template have llama.cpp's shapes and vLLM's. /v1/specprefill/explain returns the kept
chunks and the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from mlx_specprefill import InvalidRequestError, SparseUnsupportedError

from ..explain import explain_chunks, explanation
from ..fields import Body, SpecPrefillFields, TokenIds
from ..http.auth import IdentityDep
from ..http.errors import ApiError, JsonResponse, refusal
from ..http.while_connected import while_connected
from ..models.dependencies import ModelDep
from ..models.service import Service
from ..prompt.builder import Prompt
from ..prompt.conversation import Conversation, conversation, ending_of
from ..request_body import body_of
from ..serving import max_tokens_within, prompt_of_ids

router = APIRouter()

ONE_OF = ("content", "prompt", "messages")


class Rendered(Body):
    """A conversation to render."""

    model: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def conversation(self) -> Conversation:
        """Return the conversation, normalised as for an answer."""
        ending = ending_of(self.add_generation_prompt, self.continue_final_message)
        return conversation(self.messages or [], self.tools, self.chat_template_kwargs, ending)


class TokenizeRequest(Rendered):
    """The body of /tokenize: `content` (llama.cpp), `prompt` (vLLM) or `messages` (both)."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool = False  # the tokenizer's own start token, for content
    add_special_tokens: bool = True  # the same for a prompt


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: TokenIds


def _one_text(body: Mapping[str, Any]) -> None:
    given = [name for name in ONE_OF if name in body]
    if len(given) != 1:
        raise InvalidRequestError(f"exactly one of {', '.join(ONE_OF)} is needed", field=given[1] if given else None)
    if body.get("parse_special", True) is not True:
        raise refusal("parse_special", "only true is supported")


@router.post("/tokenize")
async def tokenize(
    request: Request,
    body: Annotated[TokenizeRequest, Depends(body_of(TokenizeRequest, _one_text))],
    service: ModelDep,
) -> Response:
    """Return the ids of a text or of a rendered conversation."""
    tokens = await while_connected(request, _tokens(service, body))
    counted = {"tokens": tokens, "count": len(tokens), "max_model_len": service.context_length}
    return JsonResponse(counted | service.warnings_of(body.model))


async def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return list(map(int, (await service.prompts.chat(body.conversation())).tokens))
    if body.content is not None:
        return await service.prompts.tokens(body.content, special=body.add_special, field="content")
    return await service.prompts.tokens(body.prompt or "", special=body.add_special_tokens, field="prompt")


@router.post("/detokenize")
async def detokenize(
    request: Request,
    body: Annotated[DetokenizeRequest, Depends(body_of(DetokenizeRequest))],
    service: ModelDep,
) -> Response:
    """Return the text of token ids."""
    size = service.vocabulary.size
    if not all(0 <= token < size for token in body.tokens):
        raise refusal("tokens", f"ids must be from 0 to {size - 1}")
    decoding = service.prompts.workers.run(partial(service.vocabulary.decode, body.tokens))
    text = await while_connected(request, decoding)
    return JsonResponse({"content": text, "prompt": text} | service.warnings_of(body.model))


@router.post("/apply-template")
async def apply_template(
    request: Request, body: Annotated[Rendered, Depends(body_of(Rendered))], service: ModelDep
) -> Response:
    """Return the rendered text of a conversation, ready for the assistant's answer."""
    text = await while_connected(request, service.prompts.text(body.conversation()))
    return JsonResponse({"prompt": text} | service.warnings_of(body.model))


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
    max_tokens_within(len(prompt.tokens), 1, service.context_length, field)
    inspected = prompt.request(1, body.options())
    try:
        inspection = await while_connected(request, service.inspect(inspected, identity, body.cache_salt))
    except SparseUnsupportedError as error:
        raise ApiError(400, f"Nothing to explain: {error}", code="sparse_unsupported") from error
    texts = partial(explain_chunks, service.engine.pair.tokenizer, prompt.tokens, inspection)
    chunks = await while_connected(request, service.prompts.workers.run(texts))
    names = {"object": "specprefill.explanation", "model": service.model_id, "draft": service.draft_id}
    explained = explanation(inspection, chunks) | {"tokens": prompt.tokens.tolist()}
    return JsonResponse(names | explained | service.warnings_of(body.model))


async def _prompt(service: Service, body: ExplainRequest) -> Prompt:
    if body.prompt is None:
        return await service.prompts.chat(body.conversation())
    if isinstance(body.prompt, str):
        return await service.prompts.raw(body.prompt)
    return prompt_of_ids(service, body.prompt)
