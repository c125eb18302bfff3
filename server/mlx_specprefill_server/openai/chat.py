"""POST /v1/chat/completions, streamed or collected, and the count of its prompt's tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from mlx_specprefill import Progress, TokenEvent

from ..deltas import AnswerDelta, AnswerDone, CallBroken, CallDelta, CallEnd, CallStart, Idle, ReasoningDelta, TextDelta
from ..dependencies import ModelDep, body_of
from ..errors import JsonResponse
from ..generation.generation import Generation
from ..generation.reader import Vocabulary
from ..middleware import IdentityDep
from ..report import DONE, KEEP_ALIVE, ProgressReporter, Report, TextEvents, data_event
from ..serving import Service, count_tokens, serve, while_connected
from .protocol import ChatRequest, Envelope, logprob_entry, refuse_chat

router = APIRouter()

BodyDep = Annotated[ChatRequest, Depends(body_of(ChatRequest, refuse_chat))]


@router.post("/v1/chat/completions")
async def create(request: Request, identity: IdentityDep, body: BodyDep, service: ModelDep) -> Response:
    """Answer a conversation."""
    return await serve(request, service, identity, body, ChatAnswer)


@router.post("/v1/chat/completions/input_tokens")
async def count(request: Request, body: BodyDep, service: ModelDep) -> Response:
    """Count the prompt's tokens, in llama.cpp's shape."""
    tokens = await while_connected(request, count_tokens(service, body.conversation(), body.choice()))
    return JsonResponse({"object": "response.input_tokens", "input_tokens": tokens})


class ChatAnswer:
    """The answers to one request, as a whole or as a stream."""

    def __init__(self, service: Service, body: ChatRequest, generation: Generation) -> None:
        self._generation = generation
        self._body = body
        self._vocabulary = service.vocabulary if body.logprobs else None
        self._progress = ProgressReporter(body.return_progress)
        self._report = Report(generation.prompt_tokens, body.n, body.n, generation.warnings, generation.verdicts)
        self._calls = [0] * body.n  # streams that have begun
        self._bare = not (body.logprobs or body.return_token_ids)  # chunks carry text only
        self._texts: dict[tuple[int, str], TextEvents] = {}
        self._envelope = Envelope.new("chatcmpl", "chat.completion", body.model or service.model_id)

    async def collect(self) -> dict[str, Any]:
        """Return all answers.

        Raises:
            SpecPrefillError: the engine failed on one of them or was stopped.
        """
        choices = [_Choice(i, self._vocabulary) for i in range(self._body.n)]
        async for index, delta in self._generation.stream():
            choices[index].add(delta)
            if isinstance(delta, AnswerDone):
                self._report.add(delta, index)
        self._report.raise_error()
        body = [choice.body() | self._new_ids(i) for i, choice in enumerate(choices)]
        return self._envelope.body(body, usage=self._report.usage(), **self._report.extras(), **self._prompt_ids())

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the answers' events. The first one goes out before the engine has done anything."""
        self._envelope = replace(
            self._envelope, object="chat.completion.chunk", null_usage=self._body.stream_options.include_usage
        )
        for index in range(self._body.n):
            yield self._chunk(index, {"role": "assistant", "content": ""}, **({} if index else self._prompt_ids()))
        async for index, delta in self._generation.stream():
            match delta:
                case TextDelta() if self._bare:
                    yield self._text_events(index, "content").of(delta.text)
                case ReasoningDelta() if self._bare:
                    yield self._text_events(index, "reasoning_content").of(delta.text)
                case Idle():
                    yield KEEP_ALIVE
                case Progress():
                    if (event := self._progress.report(delta)) is not None:
                        yield self._envelope.progress(event, self._progress.asked)
                case AnswerDone():
                    finish = {"index": index, "delta": {}, "logprobs": None, "finish_reason": delta.finish_reason}
                    finish |= self._new_ids(index)
                    for last in self._envelope.ending(finish, self._report, self._report.add(delta, index)):
                        yield last
                case _:
                    for fields in self._fields(index, delta):
                        yield self._chunk(index, fields, self._logprobs(delta))
        yield DONE

    def _text_events(self, index: int, name: str) -> TextEvents:
        """Return a writer of the chunks that carry an answer's next text under this name."""
        known = self._texts.get((index, name))
        if known is None:
            known = TextEvents(lambda text: self._chunk(index, {name: text}))
            self._texts[index, name] = known
        return known

    def _fields(self, index: int, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        """Yield OpenAI's `delta` objects of this delta."""
        match delta:
            case TextDelta():
                yield {"content": delta.text}
            case ReasoningDelta():
                yield {"reasoning_content": delta.text}
            case CallStart():
                function = {"name": delta.name, "arguments": ""}
                number, self._calls[index] = self._calls[index], self._calls[index] + 1
                yield {"tool_calls": [{"index": number, "id": delta.id, "type": "function", "function": function}]}
            case CallDelta():
                yield {"tool_calls": [{"index": self._calls[index] - 1, "function": {"arguments": delta.text}}]}

    def _logprobs(self, delta: AnswerDelta) -> dict[str, Any] | None:
        return _logprobs(self._vocabulary, delta.tokens) if isinstance(delta, TextDelta) else None

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None} | self._new_ids(index)
        return data_event(self._envelope.body([choice], **more))

    def _new_ids(self, index: int) -> dict[str, Any]:
        """Return vLLM's `token_ids` that no chunk has had yet."""
        return {"token_ids": self._generation.take_ids(index)} if self._body.return_token_ids else {}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._generation.prompt.tolist()} if self._body.return_token_ids else {}


class _Choice:
    """One answer, assembled from its deltas."""

    def __init__(self, index: int, vocabulary: Vocabulary | None) -> None:
        self._index = index
        self._vocabulary = vocabulary
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._tokens: list[TokenEvent] = []
        self._finish_reason = "stop"

    def add(self, delta: AnswerDelta) -> None:
        match delta:
            case TextDelta():
                self._texts.append(delta.text)
                self._tokens += delta.tokens
            case ReasoningDelta():
                self._reasoning.append(delta.text)
            case CallStart():
                self._calls.append({"id": delta.id, "type": "function", "function": {"name": delta.name}})
            case CallEnd():
                self._calls[-1]["function"]["arguments"] = delta.arguments
            case CallBroken():
                self._calls.pop()
            case AnswerDone():
                self._finish_reason = delta.finish_reason

    def body(self) -> dict[str, Any]:
        content = "".join(self._texts)
        shown = None if self._calls and not content else content
        message: dict[str, Any] = {"role": "assistant", "content": shown, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = _logprobs(self._vocabulary, self._tokens)
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._finish_reason}


def _logprobs(vocabulary: Vocabulary | None, tokens: Sequence[TokenEvent]) -> dict[str, Any] | None:
    """Return OpenAI's logprobs object, None if the request asked for none."""
    if vocabulary is None:
        return None
    return {"content": [logprob_entry(vocabulary, token) for token in tokens], "refusal": None}
