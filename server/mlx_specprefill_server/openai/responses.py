"""POST /v1/responses and /v1/responses/input_tokens. Nothing is kept between requests."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import count as numbers
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from mlx_specprefill import ContextLengthError, Progress, TokenEvent

from ..big_json import integer
from ..blocks import Block, Blocks, Step
from ..deltas import AnswerDelta, AnswerDone, Idle
from ..generation.generation import Generation
from ..http.auth import IdentityDep
from ..http.errors import JsonResponse, api_error
from ..http.event_stream import named_event
from ..models.dependencies import ModelDep
from ..models.service import Service
from ..report import ProgressReporter, Report
from ..request_body import body_of
from ..serving import count_tokens, serve
from .protocol import logprob_entry
from .responses_protocol import SEALED, TOOL_SEARCH, ResponsesRequest, refuse, sealed

Event = dict[str, Any]

CUSTOM, SEARCH_CALL = "custom_tool_call", "tool_search_call"
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    CUSTOM: "ctc",
    SEARCH_CALL: "tsc",
}
EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    CUSTOM: "response.custom_tool_call_input",
}
ARGUMENTS = {"function_call": "arguments", CUSTOM: "input"}  # the members of calls that come as text
FIELDS: dict[str, dict[str, Any]] = {  # of items that are no calls, by the kind of their block
    "text": {"type": "message", "role": "assistant", "content": []},
    "reasoning": {"type": "reasoning", "summary": [], "content": [], "encrypted_content": None},
}

router = APIRouter()

BodyDep = Annotated[ResponsesRequest, Depends(body_of(ResponsesRequest, refuse))]


def _part(kind: str, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


@router.post("/v1/responses")
async def create(request: Request, identity: IdentityDep, body: BodyDep, service: ModelDep) -> Response:
    """Answer a conversation."""
    return await serve(request, service, identity, body, ResponsesAnswer)


@router.post("/v1/responses/input_tokens")
async def count(request: Request, body: BodyDep, service: ModelDep) -> Response:
    """Count the prompt's tokens."""
    tokens = await count_tokens(request, service, body.conversation(), body.choice())
    counted = {"object": "response.input_tokens", "input_tokens": tokens}
    return JsonResponse(counted | service.warnings_of(body.model))


class ResponsesAnswer:
    """One answer as a whole response or as a stream."""

    def __init__(self, service: Service, body: ResponsesRequest, generation: Generation) -> None:
        self._generation = generation
        self._body = body
        self._progress = ProgressReporter(body.return_progress)
        self._vocabulary = service.vocabulary
        self._blocks = Blocks(body.functions.custom)
        self._origins = {name: origin for origin, name in body.functions.shown.items()}
        self._items: list[dict[str, Any]] = []  # closed items
        self._item: dict[str, Any] = {}  # the open one, and the logprobs of its tokens
        self._logprobs: list[dict[str, Any]] = []
        self._report = Report(generation)
        self._numbers = numbers()
        self._response = _fields(service, body)

    async def collect(self) -> dict[str, Any]:
        async for _, delta in self._generation.stream():
            for _ in self._events_of(delta):
                pass
        self._report.raise_error()
        return self._response

    async def stream(self) -> AsyncIterator[bytes]:
        yield self._event({"type": "response.created", "response": self._response})
        yield self._in_progress()
        async for _, delta in self._generation.stream():
            match delta:
                case Idle():
                    yield self._in_progress()
                case Progress():
                    if (event := self._progress.report(delta)) is not None:
                        yield self._in_progress(event)
                case _:
                    for event in self._events_of(delta):
                        yield self._event(event)

    def _events_of(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        if not isinstance(delta, AnswerDone):
            yield from self._write(self._blocks.push(delta))
            return
        self._report.add(delta)
        status = _status(delta)
        yield from self._write(self._blocks.close("whole" if status == "completed" else "cut"))
        self._response |= self._end(status)
        yield {"type": f"response.{status}", "response": self._response}

    def _write(self, steps: Iterable[Step]) -> Iterator[Event]:
        for step in steps:
            match step.event:
                case "open":
                    yield from self._open(step.block)
                case "piece" if self._item["type"] in EVENTS:
                    more = {"logprobs": self._logprobs_of(step.tokens)} if step.block.kind == "text" else {}
                    self._logprobs += more.get("logprobs", ())
                    yield self._about(step.block, f"{EVENTS[self._item['type']]}.delta", delta=step.text, **more)
                case "close":
                    yield from self._close(step.block)

    def _open(self, block: Block) -> Iterator[Event]:
        fields = FIELDS[block.kind] if block.kind in FIELDS else self._call(block)
        kind = fields["type"]
        self._item = {"id": f"{PREFIXES[kind]}_{uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self._logprobs = []
        yield {"type": "response.output_item.added", "output_index": block.index, "item": dict(self._item)}
        if block.kind in FIELDS:
            yield self._about(block, "response.content_part.added", part=_part(kind, "", []))

    def _call(self, block: Block) -> dict[str, Any]:
        if block.name == TOOL_SEARCH and self._body.functions.has_search:
            return {"type": SEARCH_CALL, "call_id": block.id, "execution": "client", "arguments": {}}
        kind = CUSTOM if block.kind == "custom" else "function_call"
        namespace, name = self._origins.get(block.name, (None, block.name))
        space = {} if namespace is None else {"namespace": namespace}
        return {"type": kind, "call_id": block.id, "name": name, ARGUMENTS[kind]: "", **space}

    def _close(self, block: Block) -> Iterator[Event]:
        item, kind, text = self._item, self._item["type"], block.text
        item["status"] = "completed" if block.end == "whole" else "incomplete"
        if kind == SEARCH_CALL:
            item["arguments"] = json.loads(text, parse_int=integer) if block.end == "whole" else {}
        elif kind in ARGUMENTS:
            item[ARGUMENTS[kind]] = text
            name = {} if kind == CUSTOM else {"name": item["name"]}
            yield self._about(block, f"{EVENTS[kind]}.done", **name, **{ARGUMENTS[kind]: text})
        else:
            part = _part(kind, text, self._logprobs)
            item["content"] = [part]
            if kind == "reasoning" and SEALED in self._body.include:
                item["encrypted_content"] = sealed(text)
            logprobs = {"logprobs": self._logprobs} if kind == "message" else {}
            yield self._about(block, f"{EVENTS[kind]}.done", text=text, **logprobs)
            yield self._about(block, "response.content_part.done", part=part)
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}
        self._items.append(item)

    def _about(self, block: Block, event: str, /, **fields: Any) -> Event:
        """Return an event about the content of the open item."""
        part = {"content_index": 0} if block.kind in FIELDS else {}
        return {"type": event, "item_id": self._item["id"], "output_index": block.index, **part, **fields}

    def _end(self, status: str) -> dict[str, Any]:
        fields: dict[str, Any] = {"status": status, "output": self._items, "usage": self._report.items_usage()}
        if status == "completed":
            fields["completed_at"] = int(time.time())
        elif status == "incomplete":
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            fields["error"] = _failure(self._report.error)
        return fields | self._report.prefill_fields() | {"timings": self._report.timings()}

    def _in_progress(self, prompt_progress: dict[str, Any] | None = None) -> bytes:
        more = {} if prompt_progress is None else {"prompt_progress": prompt_progress}
        return self._event({"type": "response.in_progress", "response": self._response, **more})

    def _event(self, payload: dict[str, Any]) -> bytes:
        return named_event(payload | {"sequence_number": next(self._numbers)})

    def _logprobs_of(self, tokens: Sequence[TokenEvent]) -> list[dict[str, Any]]:
        return [logprob_entry(self._vocabulary, token) for token in tokens]


def _status(end: AnswerDone) -> str:
    if end.error is not None:
        return "failed"
    return "incomplete" if end.finish_reason == "length" else "completed"


def _failure(error: Exception | None) -> dict[str, Any]:
    """Return the failure. Agents resend the prompt on every code that does not rule out success."""
    if isinstance(error, ContextLengthError):
        code = "context_length_exceeded"
    else:
        code = "server_error" if error is None or api_error(error).status == 503 else "invalid_prompt"
    return {"code": code, "message": str(error)}


def _echo(function: dict[str, Any], custom: frozenset[str]) -> dict[str, Any]:
    """Return a tool as it was understood."""
    if function["name"] in custom:
        return {"type": "custom", "name": function["name"], "description": function["description"]}
    return {"type": "function", "strict": False, **function}


def _fields(service: Service, body: ResponsesRequest) -> dict[str, Any]:
    """Return the response object before the answer: the request's fields, as understood."""
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata,
        "model": body.model or service.model_id,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": body.given(service.sampling)["temperature"],
        "text": {"format": body.text.format},
        "tool_choice": body.tool_choice,
        "tools": [_echo(tool["function"], body.functions.custom) for tool in body.functions.functions],
        "top_logprobs": body.top_logprobs,
        "top_p": body.given(service.sampling).get("top_p", body.top_p),
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
