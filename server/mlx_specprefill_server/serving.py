"""From any dialect's body to the engine's request (limit of tokens, sampling, grammars), and to the response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from mlx_specprefill import Constraint, ContextLengthError, GenerationRequest, ReasoningBudget, SamplingParams

from .constrained.answer_grammar import constraint_of
from .constrained.call_grammars import with_patterns
from .constrained.tool_choice import ToolChoice, resolve_tool_choice
from .fields import AnswerFields, ChatFields
from .generation.generation import AnswerSpec, Generation
from .generation.loops import LoopGuard
from .generation.reader import AnswerReader, IncrementalDetokenizer, StopMatcher
from .http.auth import Identity
from .http.errors import JsonResponse, refusal
from .http.event_stream import EventStream
from .http.while_connected import while_connected
from .models.service import Service
from .parsers.base import Parser
from .prompt.builder import Prompt
from .prompt.conversation import Conversation
from .prompt.deferred import tool_name

B = TypeVar("B", bound=ChatFields)


class Answer(Protocol):
    """The answers to one request in a dialect."""

    def stream(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream. The first ones go out before the engine has done anything."""

    def collect(self) -> Coroutine[Any, Any, dict[str, Any]]:
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
    try:
        return JsonResponse(await while_connected(request, answer.collect()))
    finally:
        generation.close()


async def start_answers(service: Service, body: ChatFields, identity: Identity) -> Generation:
    """Render the conversation and start its answers. The caller must close the generation.

    Raises:
        InvalidRequestError, ContextLengthError: no answer has been started.
        EngineClosedError: the engine takes no more requests.
    """
    conversation, choice, label = body.conversation(), body.choice(), identity.cache_label(body.cache_salt)
    if conversation.tools or choice != "auto":
        conversation, choice = resolve_tool_choice(conversation, choice)
        conversation = replace(conversation, tools=service.tools.sort(conversation.tools, label))
    output, tools = body.output(), conversation.callable_tools
    params = body.sampling(service.sampling, service.vocabulary)
    prompt = await service.prompts.chat(conversation)
    waiting = conversation.waiting
    hidden = await service.tools.tokens(waiting, label, service.prompts.count_tools) if waiting else 0
    forced = choice not in ("auto", "none")
    warnings = [*service.other_name(body.model), *body.ignored, *prompt.left_out]
    if tools and not service.prompts.takes_tools:
        warnings.append("the model's chat template has no place for tools: the model does not see them")
    constraint: Constraint | None = None
    free = output is None and not forced  # of a grammar that says where the answer ends
    if not free:
        make = partial(
            constraint_of,
            output,
            with_patterns(tools, conversation.inputs) if conversation.inputs else tools,
            choice,
            service.format.tools,
            body.parallel(),
            service.format.reasoning_end(prompt.ending),
            service.format.may_think(prompt.ending) if _thinks(service, body, conversation) else None,
            service.vocabulary.special,
            warnings,
        )
        constraint = await service.constrain(make)
    elif conversation.inputs:
        shaped = [tool for tool in tools if tool_name(tool) in conversation.inputs]
        constraint = await service.constrain_freely(with_patterns(shaped, conversation.inputs), warnings)
    budget = body.thinking_budget()
    spec = make_spec(
        service,
        body,
        params,
        prompt,
        partial(service.format.parser, (*tools, *waiting), prompt.ending, as_json=not free),
        field=conversation.field,
        constraint=constraint,
        reasoning=None if budget is None else service.format.budget(budget, prompt.ending),
        parallel=body.parallel(),
        forced=forced,
        unseen=frozenset(map(tool_name, waiting)),
        guarded=free and body.loop_guard != "off",
        in_grammar=() if constraint is None else conversation.inputs,
    )
    generation = service.submit([spec], identity, body.cache_salt, warnings, body.answers())
    if waiting:
        generation.deferred = len(waiting), hidden
        service.metrics.record_deferred(*generation.deferred)
    return generation


def _thinks(service: Service, body: ChatFields, conversation: Conversation) -> bool:
    """Return whether the request leaves room for reasoning before a format or a forced call."""
    kwargs = {**service.prompts.template_kwargs, **conversation.template_kwargs}
    off = kwargs.get("enable_thinking") is False or body.thinking_budget() == 0
    return conversation.ending == "answer" and not off


async def count_tokens(request: Request, service: Service, conversation: Conversation, choice: ToolChoice) -> int:
    """Return the length of the prompt that `start_answers` would make; raises as it does."""
    conversation, _ = resolve_tool_choice(conversation, choice)
    prompt = await while_connected(request, service.prompts.chat(conversation))
    return len(prompt.tokens)


def prompt_of_ids(service: Service, ids: Sequence[int]) -> Prompt:
    """Return a prompt that the client has tokenized.

    Raises:
        InvalidRequestError: an id is not in the vocabulary.
    """
    size = service.vocabulary.size
    if not all(0 <= token < size for token in ids):
        raise refusal("prompt", f"token ids must be from 0 to {size - 1}")
    return service.prompts.ids(ids)


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
    guarded: bool = False,
    in_grammar: Iterable[str] = (),
    **choices: Any,
) -> AnswerSpec:
    """Return the engine's request for one answer to `prompt`, at most as long as the remaining context, and its reader.

    Args:
        field: field of the body that holds the prompt.
        guarded: an answer that repeats itself is ended.
        in_grammar: tools whose calls may repeat themselves, since they follow a grammar.
        choices: `parallel`, `forced`, `every_token` and `unseen` of AnswerReader.

    Raises:
        InvalidRequestError: the prompt has no tokens.
        ContextLengthError: the prompt leaves no room for an answer.
    """
    room = max_tokens_within(len(prompt.tokens), body.limit(), service.context_length, field)
    # `ignore_eos` has no effect with a grammar, which ends by itself
    ignored = body.ignore_eos and constraint is None
    ends = frozenset() if ignored else service.vocabulary.stop_ids | service.format.ends
    request = replace(
        prompt.request(room, replace(body.options(), verify=service.engine.verifies)),
        sampling=params,
        stop_token_ids=frozenset(body.stop_token_ids) | ends,
        logprobs=body.alternatives(),
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
        reasoning=reasoning,
        min_tokens=min(body.min_tokens, room),
    )
    turn_end = None if ignored else service.engine.pair.turn_end

    def reader() -> AnswerReader:
        loops = LoopGuard(service.vocabulary.decode, frozenset(in_grammar)) if guarded and not body.ignore_eos else None
        return _reader(service, body, request, parser(), loops, turn_end=turn_end, **choices)

    return AnswerSpec(request, reader)


def _reader(
    service: Service,
    body: AnswerFields,
    request: GenerationRequest,
    parser: Parser,
    loops: LoopGuard | None,
    **choices: Any,
) -> AnswerReader:
    """Return a reader of one answer. `choices` are those of AnswerReader."""
    shown_ids = frozenset(body.stop_token_ids if body.include_stop_str_in_output else ())
    return AnswerReader(
        IncrementalDetokenizer(service.vocabulary.decode, request.prompt),
        parser,
        StopMatcher(body.stops(), body.include_stop_str_in_output),
        end_ids=request.stop_token_ids - shown_ids,
        with_tokens=body.with_ids() or request.logprobs is not None,
        loops=loops,
        **choices,
    )


def max_tokens_within(prompt_tokens: int, limit: int | None, context_length: int, field: str) -> int:
    """Return the largest number of tokens an answer may have.

    A limit beyond the window is cut, not refused: agents ask for their maximum on every call.

    Raises:
        InvalidRequestError: the prompt has no tokens.
        ContextLengthError: not one token fits.
    """
    if not prompt_tokens:
        raise refusal(field, "the prompt has no tokens")
    left = context_length - prompt_tokens
    least = 0 if limit == 0 else 1
    if left < least:
        raise ContextLengthError(prompt_tokens, least, context_length, field)
    return left if limit is None else min(limit, left)
