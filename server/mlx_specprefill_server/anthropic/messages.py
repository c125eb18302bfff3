"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from time import monotonic
from typing import Annotated, Any
from uuid import uuid4

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from mlx_specprefill import Progress

from ..blocks import Block, Blocks, Kind, Step
from ..deltas import AnswerDelta, AnswerDone, Idle
from ..generation.generation import Generation
from ..http.auth import IdentityDep
from ..http.errors import JsonResponse, anthropic_body
from ..http.event_stream import named_event
from ..models.dependencies import ModelDep
from ..models.service import Service
from ..report import ProgressReporter, Report
from ..request_body import body_of
from ..serving import count_tokens, serve
from .protocol import CountRequest, MessagesRequest, refuse

Event = dict[str, Any]

# A signature proves who wrote the thinking. Clients send it back unread. Some drop a thinking block without one.
SIGNATURE = "mlx-specprefill"
DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

router = APIRouter()

PING = named_event({"type": "ping"})
# Claude Code gives up after 300 s without an event. Older versions do so after 300 s of pings only.
STIR_AFTER_S = 120.0


def stop_of(end: AnswerDone, torn: bool = False) -> dict[str, Any]:
    """Return the reason for the end. `torn` means that part of a call was sent: clients expect that of cut-off answers
    only.
    """
    if torn:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if end.finish_reason == "stop" and end.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_string}
    return {"stop_reason": STOP_REASONS[end.finish_reason], "stop_sequence": None}


def events_of(steps: Iterable[Step]) -> Iterator[Event]:
    """Yield the events of an answer's steps."""
    for step in steps:
        block = step.block
        match step.event:
            case "open":
                yield {"type": "content_block_start", "index": block.index, "content_block": content_of(block)}
            case "piece":
                kind, name = DELTAS[block.kind]
                yield _delta(block, {"type": kind, name: step.text})
            case "close":
                if block.kind == "reasoning":
                    yield _delta(block, {"type": "signature_delta", "signature": SIGNATURE})
                yield {"type": "content_block_stop", "index": block.index}


def _delta(block: Block, delta: dict[str, Any]) -> Event:
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def content_of(block: Block) -> dict[str, Any]:
    """Return a block of a whole message, or an empty one of a stream."""
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE if block.end else ""}
    # numbers keep their digits; arguments that were cut off can't be passed on
    arguments = orjson.Fragment(block.text) if block.end == "whole" else {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


@router.post("/v1/messages")
async def create(
    request: Request,
    identity: IdentityDep,
    body: Annotated[MessagesRequest, Depends(body_of(MessagesRequest, refuse))],
    service: ModelDep,
) -> Response:
    """Answer a conversation."""
    return await serve(request, service, identity, body, MessageAnswer)


@router.post("/v1/messages/count_tokens")
async def count(
    request: Request, body: Annotated[CountRequest, Depends(body_of(CountRequest, refuse))], service: ModelDep
) -> Response:
    """Count the prompt's tokens."""
    tokens = await count_tokens(request, service, body.conversation(), body.choice())
    return JsonResponse({"input_tokens": tokens} | service.warnings_of(body.model))


class MessageAnswer:
    """One answer as a whole message or as a stream."""

    def __init__(self, service: Service, body: MessagesRequest, generation: Generation) -> None:
        self._generation = generation
        self._progress = ProgressReporter(body.return_progress)
        self._thinks = service.format.think is not None
        self._blocks = Blocks()
        self._report = Report(generation)
        self._head = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": body.model or service.model_id,
        }

    async def collect(self) -> dict[str, Any]:
        stop: dict[str, Any] = {}
        async for _, delta in self._generation.stream():
            for _ in self._events_of(delta):
                pass
            if isinstance(delta, AnswerDone):
                stop = stop_of(delta)
        self._report.raise_error()
        content = [content_of(block) for block in self._blocks.all if block.end != "broken"]
        answer = {**self._head, "content": content, **stop, "usage": self._usage()}
        return answer | self._report.prefill_fields()

    async def stream(self) -> AsyncIterator[bytes]:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield named_event({"type": "message_start", "message": {**self._head, **empty}})
        yield PING
        content_at = monotonic()
        async for _, delta in self._generation.stream():
            if isinstance(delta, Progress) and (event := self._progress.report(delta)) is not None:
                yield named_event({"type": "ping", "prompt_progress": event})
            events = list(self._events_of(delta))
            if isinstance(delta, Idle):
                yield PING
                if monotonic() - content_at >= STIR_AFTER_S:
                    events = list(self._stir())
            if events:
                content_at = monotonic()
            for payload in events:
                yield named_event(payload)

    def _events_of(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        if not isinstance(delta, AnswerDone):
            yield from events_of(self._blocks.push(delta))
            return
        self._report.add(delta)
        yield from events_of(self._blocks.close("cut"))
        if self._report.error is not None:
            yield anthropic_body(self._report.error) | self._report.prefill_fields()
            return
        stop = stop_of(delta, torn=any(block.end == "broken" for block in self._blocks.all))
        end = {"type": "message_delta", "delta": stop, "usage": self._usage()}
        yield end | self._report.prefill_fields()
        yield {"type": "message_stop"}

    def _stir(self) -> Iterator[Event]:
        """Yield an empty delta, in a new block if none is open. Clients count it as content."""
        open_one = self._blocks.open
        kind: Kind = "reasoning" if self._thinks else "text"
        return events_of(self._blocks.say(kind if open_one is None else open_one.kind, ""))

    def _usage(self) -> dict[str, Any]:
        """Return Anthropic's usage object. Its `input_tokens` exclude tokens from the cache."""
        cached = self._report.cached_tokens
        return {
            "input_tokens": self._report.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._report.completion_tokens,
        }
