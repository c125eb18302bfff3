"""POST /v1/specprefill/warm: read the common beginning of an agent's sessions ahead of the first one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import ConfigDict
from starlette.responses import Response

from mlx_specprefill import GenerationRequest, InvalidRequestError, SpecPrefillOptions

from ..answering import make_spec, max_tokens_within
from ..anthropic.messages import conversation_of as messages_conversation
from ..anthropic.schemas import CountRequest
from ..auth import IdentityDep
from ..constrained.tool_choice import resolve_tool_choice
from ..deltas import AnswerDone
from ..deps import ModelDep, Service, body_of, close_on_disconnect, while_connected
from ..errors import ApiError, JsonResponse
from ..fields import Body, SamplingFields
from ..generating.generation import Generation
from ..openai.responses import conversation_of as responses_conversation
from ..openai.responses_input import function_tools
from ..openai.responses_schema import ResponsesRequest
from ..openai.schemas import ChatRequest
from ..prompting.conversation import Conversation
from ..prompting.prompt import Prompt
from ..report import Report
from ..request_body import validate

__all__ = ["router"]

router = APIRouter()

ASKS = {"role": "user", "content": "."}  # many templates need a user message; the kept tokens end before it


class WarmRequest(Body):
    """A request of any dialect with a system prompt or tools. Its question is not read."""

    model_config = ConfigDict(extra="allow")

    cache_salt: str | None = None


@router.post("/v1/specprefill/warm")
async def warm(
    request: Request,
    identity: IdentityDep,
    body: Annotated[WarmRequest, Depends(body_of(WarmRequest))],
    service: ModelDep,
) -> Response:
    """Read the system prompt and the tools in full and keep them."""
    if not service.settings.prefix_cache_size:
        raise ApiError(400, "This server keeps no prefixes: its --prefix-cache-size is 0.", code="no_prefix_cache")
    given = body.model_extra or {}
    prompt = await while_connected(request, service.prompts.chat(_conversation(given)))
    opening = _opening(service, prompt)
    spec = make_spec(service, opening, SamplingFields(), lambda: service.format.parser((), ""))
    generation = service.submit([spec], identity, body.cache_salt)
    report = await close_on_disconnect(request, generation, _read(service, generation))
    answer = {"object": "specprefill.warm", "model": service.model_id, "tokens": opening.system_prefix_len}
    return JsonResponse(answer | {"cached_tokens": report.cached_tokens, "specprefill": report.specprefill()})


def _conversation(given: Mapping[str, Any]) -> Conversation:
    """Return the conversation. The dialect is told from fields that only one has."""
    body = dict(given)
    if "input" in body or "instructions" in body:
        asked = validate(ResponsesRequest, {"input": ASKS["content"], **body})
        found, choice = responses_conversation(asked, function_tools(asked.tools)), asked.choice()
    elif "system" in body or any("input_schema" in tool for tool in body.get("tools", ()) if isinstance(tool, dict)):
        counted = validate(CountRequest, {**body, "messages": body.get("messages") or [ASKS]})
        found, choice = messages_conversation(counted), counted.choice()
    else:
        chat = validate(ChatRequest, {**body, "messages": _with_a_user(body.get("messages"))})
        found, choice = chat.conversation(), chat.choice()
    return replace(found, tools=resolve_tool_choice(found.tools, choice)[0])


def _with_a_user(messages: Any) -> Any:
    if messages is None:
        return [ASKS]
    speaks = isinstance(messages, list) and any(isinstance(m, dict) and m.get("role") == "user" for m in messages)
    return [*messages, ASKS] if isinstance(messages, list) and not speaks else messages


def _opening(service: Service, prompt: Prompt) -> GenerationRequest:
    """Return the prompt's beginning and one token more. A prompt must continue after its cached part."""
    whole = GenerationRequest(prompt.tokens, 1, spans=prompt.spans)
    if not whole.system_prefix_len:
        message = "nothing to keep: the prompt begins neither with a system message nor with tools"
        raise InvalidRequestError(message, field="messages")
    tokens = prompt.tokens[: whole.system_prefix_len + 1]
    max_tokens_within(len(tokens), 1, service.context_length, "messages")
    spans = tuple(span for span in prompt.spans if span.end <= whole.system_prefix_len)
    return GenerationRequest(tokens, 1, specprefill=SpecPrefillOptions(False), spans=spans, pin_system_prefix=True)


async def _read(service: Service, generation: Generation) -> Report:
    report = Report(generation.prompt_tokens)
    async for _, delta in generation.stream():
        if isinstance(delta, AnswerDone):
            report.add(delta)
    report.raise_error()
    return report
