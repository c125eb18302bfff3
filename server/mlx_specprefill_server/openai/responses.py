"""POST /v1/responses and /v1/responses/input_tokens. Nothing is kept between requests."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import count as numbers
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from mlx_specprefill import ContextLengthError, Progress, TokenEvent

from ..auth import IdentityDep
from ..big_json import integer
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
from ..errors import JsonResponse, api_error
from ..event_stream import named_event
from ..generation.generation import Generation
from ..models.dependencies import ModelDep
from ..report import ProgressReporter, Report
from ..request_body import body_of
from ..service import Service
from ..serving import count_tokens, serve
from .custom_tools import InputText, Tools
from .protocol import logprob_entry
from .responses_protocol import SEALED, TOOL_SEARCH, ResponsesRequest, refuse, sealed

Event = dict[str, Any]
LogprobsOf = Callable[[Sequence[TokenEvent]], list[dict[str, Any]]]  # tokens as the wire's logprobs

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

router = APIRouter()

BodyDep = Annotated[ResponsesRequest, Depends(body_of(ResponsesRequest, refuse))]


class ItemWriter:
    """A writer of one answer. At most one item is open at a time: a message, reasoning or a call.

    Args:
        seals: reasoning also comes as `encrypted_content`.
    """

    def __init__(self, logprobs_of: LogprobsOf, tools: Tools, seals: bool = False) -> None:
        self.items: list[dict[str, Any]] = []  # closed items
        self._index = 0  # the index of the open item, or of the next one
        self._logprobs_of = logprobs_of
        self._seals = seals
        self._tools = tools
        self._origins = {name: origin for origin, name in tools.shown.items()}
        self._input = InputText()
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []  # the text of the open item, and the logprobs of its tokens
        self._logprobs: list[dict[str, Any]] = []

    def write(self, delta: AnswerDelta) -> Iterator[Event]:
        """Return the events of one delta."""
        match delta:
            case TextDelta() if delta.text or self._is_open("message"):  # tokens of tags alone make no message
                yield from self._ensure("message", {"role": "assistant", "content": []})
                yield self._delta(delta.text, self._logprobs_of(delta.tokens))
            case ReasoningDelta() if delta.text:
                yield from self._ensure("reasoning", {"summary": [], "content": [], "encrypted_content": None})
                yield self._delta(delta.text)
            case CallStart():
                yield from self.close()
                yield from self._start_call(delta)
            case CallDelta():
                yield from self._call_text(delta.text)
            case CallEnd():
                if self._is_open(CUSTOM) and (rest := self._input.end()):
                    yield self._delta(rest)
                yield from self.close()
            case CallBroken():
                yield from self.close("incomplete")

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Return the events that end the open item, if there is one."""
        if self._open is None:
            return
        item, text = self._open, "".join(self._text)
        item["status"] = status
        if item["type"] == SEARCH_CALL:
            item["arguments"] = json.loads(text, parse_int=integer) if status == "completed" else {}
        elif item["type"] in ARGUMENTS:
            member = ARGUMENTS[item["type"]]
            item[member] = text
            name = {"name": item["name"]} if member == "arguments" else {}
            yield self._about(f"{EVENTS[item['type']]}.done", **name, **{member: text})
        else:
            part = _part(item["type"], text, self._logprobs)
            item["content"] = [part]
            if self._seals and item["type"] == "reasoning":
                item["encrypted_content"] = sealed(text)
            logprobs = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            yield self._about(f"{EVENTS[item['type']]}.done", text=text, **logprobs)
            yield self._about("response.content_part.done", part=part)
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}
        self.items.append(item)
        self._index += 1
        self._open, self._text, self._logprobs = None, [], []

    def _start_call(self, call: CallStart) -> Iterator[Event]:
        if call.name == TOOL_SEARCH and self._tools.has_search:
            yield from self._start(SEARCH_CALL, {"call_id": call.id, "execution": "client", "arguments": {}})
            return
        kind = CUSTOM if call.name in self._tools.custom else "function_call"
        namespace, name = self._origins.get(call.name, (None, call.name))
        space = {} if namespace is None else {"namespace": namespace}
        self._input = InputText()
        yield from self._start(kind, {"call_id": call.id, "name": name, ARGUMENTS[kind]: "", **space})

    def _call_text(self, text: str) -> Iterator[Event]:
        assert self._open is not None
        match self._open["type"]:
            case "tool_search_call":
                self._text.append(text)
            case "custom_tool_call":
                if read := self._input.push(text):
                    yield self._delta(read)
            case _:
                yield self._delta(text)

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _ensure(self, kind: str, fields: dict[str, Any]) -> Iterator[Event]:
        if self._is_open(kind):
            return
        yield from self.close()
        yield from self._start(kind, fields)
        yield self._about("response.content_part.added", part=_part(kind, "", []))

    def _start(self, kind: str, fields: dict[str, Any]) -> Iterator[Event]:
        item = {"id": f"{PREFIXES[kind]}_{uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self._open = item
        yield {"type": "response.output_item.added", "output_index": self._index, "item": dict(item)}

    def _delta(self, text: str, logprobs: Sequence[dict[str, Any]] | None = None) -> Event:
        assert self._open is not None
        self._text.append(text)
        name = f"{EVENTS[self._open['type']]}.delta"
        if logprobs is None:
            return self._about(name, delta=text)
        self._logprobs += logprobs
        return self._about(name, delta=text, logprobs=logprobs)

    def _about(self, event: str, /, **fields: Any) -> Event:
        """Return an event about the content of the open item."""
        assert self._open is not None
        part = {} if self._open["type"] in ARGUMENTS else {"content_index": 0}
        return {"type": event, "item_id": self._open["id"], "output_index": self._index, **part, **fields}


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
        self._writer = ItemWriter(self._logprobs_of, body.functions, SEALED in body.include)
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
            yield from self._writer.write(delta)
            return
        self._report.add(delta)
        status = _status(delta)
        yield from self._writer.close("completed" if status == "completed" else "incomplete")
        self._response |= self._end(status)
        yield {"type": f"response.{status}", "response": self._response}

    def _end(self, status: str) -> dict[str, Any]:
        fields: dict[str, Any] = {"status": status, "output": self._writer.items, "usage": self._usage()}
        if status == "completed":
            fields["completed_at"] = int(time.time())
        elif status == "incomplete":
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            fields["error"] = _failure(self._report.error)
        return fields | self._report.prefill_fields() | {"timings": self._report.timings()}

    def _usage(self) -> dict[str, Any]:
        report = self._report
        return {
            "input_tokens": report.prompt_tokens,
            "input_tokens_details": {"cached_tokens": report.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": report.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": report.reasoning_tokens},
            "total_tokens": report.prompt_tokens + report.completion_tokens,
        }

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
