"""POST /v1/chat/completions, streamed or collected, and the count of its prompt's tokens.

Unknown fields are ignored; unsupported ones that would change the answer are refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from mlx_specprefill import Progress, TokenEvent

from ..blocks import Block, Blocks, Kind
from ..deltas import AnswerDelta, AnswerDone, Idle, ReasoningDelta, TextDelta
from ..fields import MaxTokens, Refused, Whole, first_limit, refuse_fields, refuse_sampling
from ..generation.generation import Generation
from ..generation.reader import Vocabulary
from ..http.auth import IdentityDep
from ..http.errors import JsonResponse, refusal
from ..http.event_stream import DONE, KEEP_ALIVE, data_event
from ..models.dependencies import ModelDep
from ..models.service import Service
from ..prompt.conversation import Conversation, conversation, ending_of
from ..report import ProgressReporter, Report
from ..request_body import body_of
from ..serving import count_tokens, serve
from .custom_tools import Tools, chat_tools
from .protocol import ConversationFields, Envelope, logprob_entry, refuse_best_of

router = APIRouter()

REFUSED_IN_CHAT: Refused = {
    "functions": (([],), "not supported; use tools"),
    "function_call": (("auto", "none"), "not supported; use tools"),
    "modalities": ((["text"],), "only ['text'] is supported"),
    "audio": (({},), "not supported"),
    "web_search_options": ((), "not supported"),
    "echo": ((False,), "not supported; with continue_final_message the answer goes on with the last message"),
}


MEMBERS = {"call": ("function", "arguments"), "custom": ("custom", "input")}  # of calls, by the kind of their block


class ChatRequest(ConversationFields):
    """The body of POST /v1/chat/completions. `conversation` checks messages and tools."""

    messages: list[Any]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] = 0
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    documents: list[Any] = Field(default_factory=list)

    @cached_property
    def functions(self) -> Tools:
        """The tools as functions; raises InvalidRequestError."""
        return chat_tools(self.tools)

    def conversation(self) -> Conversation:
        ending = ending_of(self.add_generation_prompt, self.continue_final_message)
        kwargs = self.template_kwargs(self.reasoning_effort)
        tools = self.functions
        given = conversation(self.messages, tools.functions, kwargs, ending, left_out=tools.left_out)
        if tools.inputs:
            given = replace(given, inputs=tools.inputs)
        if not self.documents:
            return given
        return replace(given, template_kwargs={**given.template_kwargs, "documents": self.documents})

    def limit(self) -> int | None:
        return first_limit(self.max_completion_tokens, self.max_tokens, self.n_predict)

    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def with_ids(self) -> bool:
        return self.return_token_ids


def refuse_chat(body: Mapping[str, Any]) -> None:
    """Refuse fields that chat completions don't support, by an InvalidRequestError."""
    refuse_best_of(body)
    refuse_sampling(body)
    refuse_fields(body, REFUSED_IN_CHAT)
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise refusal("top_logprobs", "needs logprobs to be true")


BodyDep = Annotated[ChatRequest, Depends(body_of(ChatRequest, refuse_chat))]


@router.post("/v1/chat/completions")
async def create(request: Request, identity: IdentityDep, body: BodyDep, service: ModelDep) -> Response:
    """Answer a conversation."""
    return await serve(request, service, identity, body, ChatAnswer)


@router.post("/v1/chat/completions/input_tokens")
async def count(request: Request, body: BodyDep, service: ModelDep) -> Response:
    """Count the prompt's tokens, in llama.cpp's shape."""
    tokens = await count_tokens(request, service, body.conversation(), body.choice())
    counted = {"object": "response.input_tokens", "input_tokens": tokens}
    return JsonResponse(counted | service.warnings_of(body.model))


class ChatAnswer:
    """The answers to one request, as a whole or as a stream."""

    def __init__(self, service: Service, body: ChatRequest, generation: Generation) -> None:
        self._generation = generation
        self._body = body
        self._vocabulary = service.vocabulary if body.logprobs else None
        self._progress = ProgressReporter(body.return_progress)
        self._report = Report(generation)
        self._choices = [_Choice(i, self._vocabulary, body.functions.custom) for i in range(body.n)]
        self._envelope = Envelope.new("chatcmpl", "chat.completion", body.model or service.model_id)

    async def collect(self) -> dict[str, Any]:
        async for index, delta in self._generation.stream():
            self._choices[index].add(delta)
            if isinstance(delta, AnswerDone):
                self._report.add(delta, index)
        self._report.raise_error()
        body = [choice.body() | self._new_ids(i) for i, choice in enumerate(self._choices)]
        return self._envelope.body(body, usage=self._report.usage(), **self._report.extras(), **self._prompt_ids())

    async def stream(self) -> AsyncIterator[bytes]:
        self._envelope = replace(
            self._envelope, object="chat.completion.chunk", null_usage=self._body.stream_options.include_usage
        )
        for index in range(self._body.n):
            yield self._chunk(index, {"role": "assistant", "content": ""}, **({} if index else self._prompt_ids()))
        async for index, delta in self._generation.stream():
            match delta:
                case Idle():
                    yield KEEP_ALIVE
                case Progress():
                    if (event := self._progress.report(delta)) is not None:
                        yield self._envelope.progress(event, self._progress.wanted)
                case AnswerDone():
                    finish = {"index": index, "delta": {}, "logprobs": None, "finish_reason": delta.finish_reason}
                    finish |= self._new_ids(index)
                    for last in self._envelope.ending(finish, self._report, self._report.add(delta, index)):
                        yield last
                case _:
                    for fields in self._fields(index, delta):
                        yield self._chunk(index, fields, self._logprobs(delta))
        yield DONE

    def _fields(self, index: int, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        """Yield OpenAI's `delta` objects of this delta."""
        match delta:
            case TextDelta():
                yield {"content": delta.text}
            case ReasoningDelta():
                yield {"reasoning_content": delta.text}
            case _:
                for step in self._choices[index].blocks.push(delta):
                    place = {"index": step.block.index}
                    if step.event == "open":
                        yield {"tool_calls": [place | _call(step.block, "")]}
                    elif step.event == "piece":
                        member, name = MEMBERS[step.block.kind]
                        yield {"tool_calls": [place | {member: {name: step.text}}]}

    def _logprobs(self, delta: AnswerDelta) -> dict[str, Any] | None:
        return _logprobs(self._vocabulary, delta.tokens) if isinstance(delta, TextDelta) else None

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None} | self._new_ids(index)
        return data_event(self._envelope.body([choice], **more))

    def _new_ids(self, index: int) -> dict[str, Any]:
        """Return vLLM's `token_ids` that no chunk has had yet."""
        return {"token_ids": self._generation.take_ids(index)} if self._body.return_token_ids else {}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._generation.prompts[0].tolist()} if self._body.return_token_ids else {}


class _Choice:
    """One answer, assembled from its deltas."""

    def __init__(self, index: int, vocabulary: Vocabulary | None, custom: frozenset[str]) -> None:
        self.blocks = Blocks(custom)  # in streams of calls only
        self._index = index
        self._vocabulary = vocabulary
        self._tokens: list[TokenEvent] = []
        self._finish_reason = "stop"

    def add(self, delta: AnswerDelta) -> None:
        for _ in self.blocks.push(delta):
            pass
        match delta:
            case TextDelta():
                self._tokens += delta.tokens
            case AnswerDone():
                self._finish_reason = delta.finish_reason

    def body(self) -> dict[str, Any]:
        content = self._text("text")
        calls = [_call(call, call.text) for call in self.blocks.all if call.kind in MEMBERS and call.end != "broken"]
        shown = None if calls and not content else content
        message: dict[str, Any] = {"role": "assistant", "content": shown, "refusal": None}
        if reasoning := self._text("reasoning"):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = _logprobs(self._vocabulary, self._tokens)
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._finish_reason}

    def _text(self, kind: Kind) -> str:
        return "".join(block.text for block in self.blocks.all if block.kind == kind)


def _call(block: Block, text: str) -> dict[str, Any]:
    member, name = MEMBERS[block.kind]
    return {"id": block.id, "type": member, member: {"name": block.name, name: text}}


def _logprobs(vocabulary: Vocabulary | None, tokens: Sequence[TokenEvent]) -> dict[str, Any] | None:
    """Return OpenAI's logprobs object, None if the request asked for none."""
    if vocabulary is None:
        return None
    return {"content": [logprob_entry(vocabulary, token) for token in tokens], "refusal": None}
