"""POST /v1/chat/completions: to a job, then streamed or collected."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from mlx_specprefill import Logprob, TokenEvent

from ..conversation import conversation
from ..deltas import Delta
from ..deps import Service, ServiceDep, body_of, unless_client_leaves
from ..errors import JsonResponse
from ..generation import Done, Generation, Idle, Job, Working
from ..output_format import constraint_of
from ..report import Report
from ..sse import DONE, KEEP_ALIVE, EventStream, data
from ..vocabulary import Vocabulary
from .schemas import ChatRequest, refuse_chat
from .wire import LOWEST_LOGPROB, Envelope, make_job, progress

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions")
async def create(
    request: Request, service: ServiceDep, body: Annotated[ChatRequest, Depends(body_of(ChatRequest, refuse_chat))]
) -> Response:
    """Answers a conversation."""
    job = await _job(service, body)
    generation = service.submit([job])
    answer = ChatAnswer(service, body, job)
    if body.stream:
        return EventStream(answer.stream(generation), generation)
    return JsonResponse(await unless_client_leaves(request, generation, answer.collect(generation)))


async def _job(service: Service, body: ChatRequest) -> Job:
    tools = [] if body.tool_choice == "none" else body.tools
    prompt = await service.prompts.chat(conversation(body.messages, tools, body.template_kwargs()))
    logprobs = body.top_logprobs if body.logprobs else None
    constraint = constraint_of(body.output(), special=service.vocabulary.special)
    await service.compile(constraint)
    return make_job(service, body, prompt, body.limit(), "messages", logprobs, constraint=constraint)


class ChatAnswer:
    """Writes one chat answer to the wire."""

    def __init__(self, service: Service, body: ChatRequest, job: Job) -> None:
        self._vocabulary = service.vocabulary
        self._keep_alive = service.settings.keep_alive_s
        self._body = body
        self._prompt_tokens = len(job.request.prompt)
        self._report = Report(self._prompt_tokens, answers=1)
        self._envelope = Envelope.new("chatcmpl", "chat.completion", body.model or service.model_id)

    async def collect(self, generation: Generation) -> dict[str, Any]:
        """The whole answer.

        Raises:
            SpecPrefillError: the engine failed or was stopped.
        """
        text, tokens, finish_reason = "", list[TokenEvent](), "stop"
        async for piece in generation.pieces(self._keep_alive):
            match piece:
                case Delta():
                    text += piece.text
                    tokens += piece.tokens
                case Done():
                    finish_reason = piece.finish_reason
                    self._report.add(piece)
        self._report.raise_error()
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": self._logprobs(tokens), "finish_reason": finish_reason}
        return self._envelope.body([choice], usage=self._report.usage(), **self._report.extras())

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer as it is made. The first event goes out before the engine has done anything."""
        started = time.monotonic()
        self._envelope = replace(
            self._envelope, object="chat.completion.chunk", null_usage=self._body.stream_options.include_usage
        )
        yield self._chunk({"role": "assistant", "content": ""})
        if self._body.return_progress:
            yield self._progress(Working(0, "queued", 0, self._prompt_tokens), started)
        async for piece in generation.pieces(self._keep_alive):
            match piece:
                case Idle():
                    yield KEEP_ALIVE
                case Working() if self._body.return_progress:
                    yield self._progress(piece, started)
                case Delta():
                    yield self._chunk({"content": piece.text}, piece.tokens)
                case Done():
                    self._report.add(piece)
                    for last in self._ending(piece):
                        yield last
        yield DONE

    def _ending(self, end: Done) -> list[bytes]:
        """The finish chunk, and the usage chunk if asked for; the account rides in whichever is last."""
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": end.finish_reason}
        if not self._body.stream_options.include_usage:
            return [data(self._envelope.body([choice], **self._report.extras()))]
        usage = self._envelope.body([], **{"usage": self._report.usage()}, **self._report.extras())
        return [data(self._envelope.body([choice])), data(usage)]

    def _chunk(self, delta: dict[str, Any], tokens: Sequence[TokenEvent] = ()) -> bytes:
        logprobs = self._logprobs(tokens) if tokens else None
        return data(self._envelope.body([{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}]))

    def _progress(self, piece: Working, started: float) -> bytes:
        return data(self._envelope.body([], prompt_progress=progress(piece, started)))

    def _logprobs(self, tokens: Sequence[TokenEvent]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": [_scored(self._vocabulary, token) for token in tokens], "refusal": None}


def _scored(vocabulary: Vocabulary, event: TokenEvent) -> dict[str, Any]:
    own = Logprob(event.token, LOWEST_LOGPROB if event.logprob is None else event.logprob)
    return _entry(vocabulary, own) | {"top_logprobs": [_entry(vocabulary, other) for other in event.top_logprobs]}


def _entry(vocabulary: Vocabulary, scored: Logprob) -> dict[str, Any]:
    return {
        "token": vocabulary.token_text(scored.token),
        "logprob": max(scored.logprob, LOWEST_LOGPROB),
        "bytes": vocabulary.token_bytes(scored.token),
    }
