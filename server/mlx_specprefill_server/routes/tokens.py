"""Text to tokens and back: /tokenize, /detokenize and /apply-template, in llama.cpp's shapes and vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from mlx_specprefill import InvalidRequestError

from ..deps import ModelDep, Service, body_of, while_connected
from ..errors import JsonResponse
from ..fields import Body, TokenIds
from ..prompting.conversation import Conversation, conversation, ending_of

__all__ = ["router"]

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
    with_pieces: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: TokenIds


def _one_prompt(body: Mapping[str, Any]) -> None:
    given = [name for name in ONE_OF if name in body]
    if len(given) != 1:
        raise InvalidRequestError(f"exactly one of {', '.join(ONE_OF)} is needed", field=given[1] if given else None)
    if body.get("parse_special", True) is not True:
        raise InvalidRequestError("parse_special: only true is supported", field="parse_special")


@router.post("/tokenize")
async def tokenize(
    request: Request,
    body: Annotated[TokenizeRequest, Depends(body_of(TokenizeRequest, _one_prompt))],
    service: ModelDep,
) -> Response:
    """Return the ids of a text or of a rendered conversation."""
    tokens = await while_connected(request, _tokens(service, body))
    answer: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": service.context_length}
    if body.with_pieces:
        answer["tokens"] = [{"id": token, "piece": _piece(service, token)} for token in tokens]
    if body.return_token_strs:
        answer["token_strs"] = [service.vocabulary.token_text(token) for token in tokens]
    return JsonResponse(answer)


async def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return list(map(int, (await service.prompts.chat(body.conversation())).tokens))
    if body.content is not None:
        return await service.prompts.tokens(body.content, special=body.add_special, field="content")
    return await service.prompts.tokens(body.prompt or "", special=body.add_special_tokens, field="prompt")


def _piece(service: Service, token: int) -> str | list[int]:
    """Return a token's text, or its bytes if they are only a part of a character."""
    data = bytes(service.vocabulary.token_bytes(token))
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


@router.post("/detokenize")
async def detokenize(
    request: Request,
    body: Annotated[DetokenizeRequest, Depends(body_of(DetokenizeRequest))],
    service: ModelDep,
) -> Response:
    """Return the text of token ids."""
    size = service.vocabulary.size
    if not all(0 <= token < size for token in body.tokens):
        raise InvalidRequestError(f"tokens: ids must be from 0 to {size - 1}", field="tokens")
    decoding = service.prompts.run(partial(service.vocabulary.decode, body.tokens))
    text = await while_connected(request, decoding)
    return JsonResponse({"content": text, "prompt": text})


@router.post("/apply-template")
async def apply_template(
    request: Request, body: Annotated[Rendered, Depends(body_of(Rendered))], service: ModelDep
) -> Response:
    """Return the rendered text of a conversation, ready for the assistant's answer."""
    text = await while_connected(request, service.prompts.text(body.conversation()))
    return JsonResponse({"prompt": text})
