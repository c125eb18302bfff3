"""From a body of any dialect to the engine's requests, and to the response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from mlx_specprefill import (
    Constraint,
    ContextLengthError,
    GenerationRequest,
    InvalidRequestError,
    ReasoningBudget,
    SamplingParams,
)

from .auth import Identity
from .constrained.output_format import constraint_of
from .constrained.tool_choice import ToolChoice, resolve_tool_choice
from .deltas import ContentDelta
from .deps import Service, close_on_disconnect, while_connected
from .errors import JsonResponse
from .fields import AnswerFields, ChatFields, SamplingFields
from .generation.generation import AnswerSpec, Generation
from .generation.reader import AnswerReader, IncrementalDetokenizer, Stops
from .parsers.base import Parser
from .prompt.conversation import Conversation
from .prompt.prompt import Prompt
from .report import EventStream

__all__ = [
    "copies",
    "count_tokens",
    "make_spec",
    "max_tokens_within",
    "respond",
    "sampling_params",
    "serve",
]

B = TypeVar("B", bound=ChatFields)


class Answer(Protocol):
    """The answers to one request in a dialect."""

    def stream(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""

    async def collect(self) -> dict[str, Any]:
        """Return the whole response; raises SpecPrefillError."""


async def serve(
    request: Request, service: Service, identity: Identity, body: B, dialect: Callable[[Service, B, Generation], Answer]
) -> Response:
    """Answer a conversation in a dialect."""
    generation = await while_connected(request, start_answers(service, body, identity))
    return await respond(request, generation, dialect(service, body, generation), streamed=body.stream)


async def respond(request: Request, generation: Generation, answer: Answer, *, streamed: bool) -> Response:
    """Return a stream of the answers, or all of them when they are done. Close the generation in any case."""
    if streamed:
        return EventStream(answer.stream(), generation)
    return JsonResponse(await close_on_disconnect(request, generation, answer.collect()))


async def start_answers(service: Service, body: ChatFields, identity: Identity) -> Generation:
    """Render the conversation and start its answers. The caller must close the generation.

    Raises:
        InvalidRequestError, ContextLengthError: no answer has been started.
        EngineClosedError: the engine takes no more requests.
    """
    conversation, choice, output = body.conversation(), body.choice(), body.output()
    if conversation.tools or choice != "auto":
        tools, choice = resolve_tool_choice(conversation.tools, choice)
        conversation = replace(conversation, tools=tools)
    label = identity.cache_label(body.cache_salt)
    conversation = service.stable(conversation, label)
    params = await sampling_params(service, body)
    prompt = await service.prompts.chat(conversation)
    forced = choice not in ("auto", "none")
    warnings = list(prompt.left_out)
    if conversation.tools and not (forced or service.prompts.takes_tools):
        warnings.append("the model's chat template has no place for tools: the model is not told of them")
    constraint: Constraint | None = None
    if output is not None or forced:
        constraint = constraint_of(
            output,
            conversation.tools,
            choice,
            service.format.tools or ("hermes" if forced else None),  # a template without calls: any notation will do
            body.parallel(),
            service.format.reasoning_end(prompt.ending),
            service.vocabulary.special,
            warnings,
        )
        await service.compile(constraint)
    budget = body.thinking_budget()
    spec = make_spec(
        service,
        body,
        params,
        prompt,
        lambda: service.format.parser(conversation.tools, prompt.ending),
        field=conversation.field,
        constraint=constraint,
        reasoning=None if budget is None else service.format.budget(budget, prompt.ending),
        parallel=body.parallel(),
        forced=forced,
        noting=None if service.reasoning is None else partial(service.reasoning.noting, label),
    )
    return service.submit(copies(spec, body.answers()), identity, body.cache_salt, warnings)


async def sampling_params(service: Service, fields: SamplingFields) -> SamplingParams:
    """Return the engine's sampling parameters.

    A forbidden word is forbidden at the start of a text and inside one.

    Raises:
        InvalidRequestError: names the field.
    """
    params = fields.sampling(service.sampling, service.vocabulary)
    words = [text for word in fields.bad_words for text in (word.lstrip(), f" {word.lstrip()}")]
    ids = [tuple(await service.prompts.tokens(word, special=False, field="bad_words")) for word in words]
    return replace(params, bad_words=tuple(dict.fromkeys(filter(None, ids))))


async def count_tokens(service: Service, conversation: Conversation, choice: ToolChoice) -> int:
    """Return the length of the prompt that `start_answers` would make.

    Raises:
        InvalidRequestError: the conversation or the tool choice is invalid.
    """
    tools, _ = resolve_tool_choice(conversation.tools, choice)
    return len((await service.prompts.chat(replace(conversation, tools=tools))).tokens)


def make_spec(
    service: Service,
    body: AnswerFields,
    params: SamplingParams,
    prompt: Prompt,
    parser: Callable[[], Parser],
    *,
    field: str,
    prompt_logprobs: int | None = None,
    constraint: Constraint | None = None,
    reasoning: ReasoningBudget | None = None,
    parallel: bool = True,
    forced: bool = False,
    every_token: bool = False,
    noting: Callable[[], Callable[[ContentDelta], None]] | None = None,
) -> AnswerSpec:
    """Return the engine's request for one answer to `prompt`, at most as long as the remaining context, and its reader.

    Args:
        field: field of the body that holds the prompt.
        parallel, forced, every_token: as in AnswerReader.
        noting: makes the `saw` of one AnswerReader.

    Raises:
        InvalidRequestError: the prompt has no tokens.
        ContextLengthError: the prompt leaves no room for an answer.
    """
    if not prompt.tokens.size:
        raise InvalidRequestError(f"{field}: the prompt has no tokens", field=field)
    room = max_tokens_within(len(prompt.tokens), body.limit(), service.context_length, field)
    request = GenerationRequest(
        prompt=prompt.tokens,
        max_tokens=room,
        sampling=params,
        specprefill=body.options(),
        spans=prompt.spans,
        stop_token_ids=_stop_ids(service, body, constraint),
        logprobs=body.alternatives(),
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
        reasoning=reasoning,
        min_tokens=min(body.min_tokens, room),
    )
    shown_ids = frozenset(body.stop_token_ids if body.include_stop_str_in_output else ())

    def reader() -> AnswerReader:
        return AnswerReader(
            IncrementalDetokenizer(service.vocabulary.decode, request.prompt),
            parser(),
            Stops(body.stops(), body.include_stop_str_in_output),
            end_ids=request.stop_token_ids - shown_ids,
            parallel=parallel,
            forced=forced,
            with_tokens=body.with_ids() or request.logprobs is not None,
            every_token=every_token,
            saw=None if noting is None else noting(),
        )

    return AnswerSpec(request, reader)


def copies(spec: AnswerSpec, n: int, first: int = 0) -> list[AnswerSpec]:
    """Return `n` specs for one prompt, which is read once. `first` is the number of the first one among all specs."""
    others = [replace(spec, request=_with_seed(spec.request, i), follows=first) for i in range(1, n)]
    return [spec, *others]


def _with_seed(request: GenerationRequest, answer: int) -> GenerationRequest:
    """Return a request whose seed differs between the answers of one request and repeats for the same seed."""
    sampling = request.sampling
    if sampling.seed is None:
        return request
    return replace(request, sampling=replace(sampling, seed=sampling.seed + answer))


def max_tokens_within(prompt_tokens: int, asked: int | None, context_length: int, field: str) -> int:
    """Return the largest number of tokens an answer may have.

    A limit beyond the window is cut, not refused: agents ask for their maximum on every call.

    Raises:
        ContextLengthError: not one token fits.
    """
    left = context_length - prompt_tokens
    least = 0 if asked == 0 else 1
    if left < least:
        error = ContextLengthError(prompt_tokens, least, context_length)
        error.field = field
        raise error
    return left if asked is None else min(asked, left)


def _stop_ids(service: Service, fields: SamplingFields, constraint: Constraint | None) -> frozenset[int]:
    """Return the tokens that end an answer. `ignore_eos` has no effect with a grammar, which ends by itself."""
    own = frozenset(fields.stop_token_ids)
    if fields.ignore_eos and constraint is None:
        return own
    return own | service.vocabulary.stop_ids | service.format.ends
