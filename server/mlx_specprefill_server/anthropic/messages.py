"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from time import monotonic
from typing import Annotated, Any
from uuid import uuid4

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from mlx_specprefill import Progress

from ..auth import IdentityDep
from ..deltas import (
    AnswerDelta,
    AnswerDone,
    CallBroken,
    CallDelta,
    CallEnd,
    CallStart,
    Idle,
    ReasoningDelta,
    TextDelta,
)
from ..errors import JsonResponse, anthropic_body
from ..event_stream import named_event
from ..generation.generation import Generation
from ..models.dependencies import ModelDep
from ..report import ProgressReporter, Report
from ..request_body import body_of
from ..service import Service
from ..serving import count_tokens, serve
from .protocol import CountRequest, MessagesRequest, refuse

Event = dict[str, Any]

# A signature proves who wrote the thinking. Clients send it back unread. Some drop a thinking block without one.
SIGNATURE = "mlx-specprefill"
START: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
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


class BlockWriter:
    """A writer of one answer. At most one block is open at a time: text, thinking or a tool call."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []  # closed blocks, in the form of a whole message
        self._index = 0  # the index of the open block, or of the next one
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []  # the text of the open block
        self.broken = False  # a call was announced and turned out malformed

    def write(self, delta: AnswerDelta) -> Iterator[Event]:
        """Return the events of one delta."""
        match delta:
            case TextDelta() if delta.text:
                yield from self._ensure("text")
                yield self._delta(delta.text)
            case ReasoningDelta() if delta.text:
                yield from self._ensure("thinking")
                yield self._delta(delta.text)
            case CallStart():
                yield from self.close()
                yield self._start({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
            case CallDelta():
                yield self._delta(delta.text)
            case CallEnd():
                yield from self.close(delta.arguments)
            case CallBroken():
                yield from self.close()
                self.blocks.pop()
                self.broken = True

    def stir(self, thinks: bool) -> Iterator[Event]:
        """Return an empty delta, in a new block if none is open. Clients count it as content."""
        if self._open is None:
            yield self._start(START["thinking" if thinks else "text"])
        yield self._delta("")

    def close(self, arguments: str = "{}") -> Iterator[Event]:
        """Return the event that ends the open block, if there is one.

        Args:
            arguments: of a complete call, as JSON; those of a call that was cut off can't be passed on.
        """
        if self._open is None:
            return
        block, text = self._open, "".join(self._text)
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            yield self._delta_event({"type": "signature_delta", "signature": SIGNATURE})
        if block["type"] == "tool_use":
            block["input"] = orjson.Fragment(arguments)  # numbers keep their digits
        else:
            block[block["type"]] = text
        yield {"type": "content_block_stop", "index": self._index}
        self.blocks.append(block)
        self._index += 1
        self._open, self._text = None, []

    def _ensure(self, kind: str) -> Iterator[Event]:
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self.close()
        yield self._start(START[kind])

    def _start(self, block: dict[str, Any]) -> Event:
        self._open = dict(block)
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, text: str) -> Event:
        assert self._open is not None
        self._text.append(text)
        kind, name = DELTAS[self._open["type"]]
        return self._delta_event({"type": kind, name: text})

    def _delta_event(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


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
        self._writer = BlockWriter()
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
        answer = {**self._head, "content": self._writer.blocks, **stop, "usage": self._usage()}
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
                    events = list(self._writer.stir(self._thinks))
            if events:
                content_at = monotonic()
            for payload in events:
                yield named_event(payload)

    def _events_of(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        if not isinstance(delta, AnswerDone):
            yield from self._writer.write(delta)
            return
        self._report.add(delta)
        yield from self._writer.close()
        if self._report.error is not None:
            yield anthropic_body(self._report.error) | self._report.prefill_fields()
            return
        stop = stop_of(delta, torn=self._writer.broken)
        end = {"type": "message_delta", "delta": stop, "usage": self._usage()}
        yield end | self._report.prefill_fields()
        yield {"type": "message_stop"}

    def _usage(self) -> dict[str, Any]:
        """Return Anthropic's usage object. Its `input_tokens` exclude tokens from the cache."""
        cached = self._report.cached_tokens
        return {
            "input_tokens": self._report.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._report.completion_tokens,
        }
