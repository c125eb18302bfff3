"""Dialect-neutral requests for answers. Every dialect's body becomes one, and the engine gets requests made from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlx_specprefill import (
    Constraint,
    ContextLengthError,
    GenerationRequest,
    InvalidRequestError,
    ReasoningBudget,
    SamplingParams,
    SpecPrefillOptions,
)

from .auth import Identity
from .constrained.output_format import OutputFormat, constraint_of
from .constrained.tool_choice import ToolChoice, resolve_tool_choice
from .deps import Service
from .fields import SamplingFields
from .generation.generation import AnswerSpec, Generation
from .generation.reader import AnswerReader, IncrementalDetokenizer, Stops
from .parsers.base import Parser
from .prompt.conversation import Conversation
from .prompt.prompt import Prompt

__all__ = [
    "AnswerRequest",
    "copies",
    "count_tokens",
    "engine_request",
    "make_spec",
    "max_tokens_within",
    "sampling_params",
    "start_answers",
]


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A request for answers to a conversation.

    Attributes:
        max_tokens: per answer; None: the remaining context.
        stops: strings that end the visible text; neither they nor what follows is shown.
        output: required form of the text; None: free text.
        sampling: fields of sampling and of the tokens that end an answer.
        thinking_budget: largest number of reasoning tokens per answer; None: no limit.
        n: number of answers.
        logprobs: number of alternatives per token (0..20), or None.
    """

    conversation: Conversation
    sampling: SamplingFields
    specprefill: SpecPrefillOptions
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    output: OutputFormat | None = None
    n: int = 1
    logprobs: int | None = None
    return_token_ids: bool = False
    thinking_budget: int | None = None

    @property
    def forced(self) -> bool:
        """True if the answer must be tool calls."""
        return self.tool_choice not in ("auto", "none")


async def start_answers(
    service: Service, request: AnswerRequest, identity: Identity, cache_salt: str | None
) -> Generation:
    """Render the conversation and start its answers. The caller must close the generation.

    Raises:
        InvalidRequestError, ContextLengthError: no answer has been started.
        EngineClosedError: the engine takes no more requests.
    """
    if request.conversation.tools or request.tool_choice != "auto":
        tools, choice = resolve_tool_choice(request.conversation.tools, request.tool_choice)
        request = replace(request, conversation=replace(request.conversation, tools=tools), tool_choice=choice)
    params = await sampling_params(service, request.sampling)
    prompt = await service.prompts.chat(request.conversation)
    warnings: list[str] = []
    if request.conversation.tools and not (request.forced or service.prompts.takes_tools):
        warnings.append("the model's chat template has no place for tools: the model is not told of them")
    constraint = _constraint(service, request, prompt, warnings)
    if constraint is not None:
        await service.compile(constraint)
    spec = _spec(service, request, params, prompt, constraint)
    return service.submit(copies(spec, request.n), identity, cache_salt, warnings)


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


def _constraint(service: Service, request: AnswerRequest, prompt: Prompt, warnings: list[str]) -> Constraint | None:
    """Return the grammar of the answer, None if it is free.

    A call can be forced from any model. One whose template has no format for calls writes Hermes'.
    """
    if request.output is None and not request.forced:
        return None
    return constraint_of(
        request.output,
        request.conversation.tools,
        request.tool_choice,
        service.format.tools or ("hermes" if request.forced else None),
        request.parallel_tool_calls,
        service.format.reasoning_end(prompt.ending),
        service.vocabulary.special,
        warnings,
    )


def _spec(
    service: Service, request: AnswerRequest, params: SamplingParams, prompt: Prompt, constraint: Constraint | None
) -> AnswerSpec:
    budget, tools = request.thinking_budget, request.conversation.tools
    for_engine = engine_request(
        service,
        prompt,
        request.sampling,
        params,
        request.specprefill,
        max_tokens=request.max_tokens,
        field=request.conversation.field,
        logprobs=request.logprobs,
        constraint=constraint,
        reasoning=None if budget is None else service.format.budget(budget, prompt.ending),
    )
    return make_spec(
        service,
        for_engine,
        request.sampling,
        lambda: service.format.parser(tools, prompt.ending),
        stops=request.stops,
        return_token_ids=request.return_token_ids,
        parallel=request.parallel_tool_calls,
        forced=request.forced,
    )


def engine_request(
    service: Service,
    prompt: Prompt,
    fields: SamplingFields,
    params: SamplingParams,
    specprefill: SpecPrefillOptions,
    *,
    max_tokens: int | None,
    field: str,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    constraint: Constraint | None = None,
    reasoning: ReasoningBudget | None = None,
) -> GenerationRequest:
    """Return the engine's request for one answer to `prompt`, at most as long as the remaining context.

    Args:
        field: field of the body that holds the prompt.

    Raises:
        InvalidRequestError: the prompt has no tokens.
        ContextLengthError: the prompt leaves no room for an answer.
    """
    if not prompt.tokens.size:
        raise InvalidRequestError(f"{field}: the prompt has no tokens", field=field)
    room = max_tokens_within(len(prompt.tokens), max_tokens, service.context_length, field)
    return GenerationRequest(
        prompt=prompt.tokens,
        max_tokens=room,
        sampling=params,
        specprefill=specprefill,
        spans=prompt.spans,
        stop_token_ids=_stop_ids(service, fields, constraint),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
        reasoning=reasoning,
        min_tokens=min(fields.min_tokens, room),
    )


def make_spec(
    service: Service,
    request: GenerationRequest,
    fields: SamplingFields,
    parser: Callable[[], Parser],
    *,
    stops: Sequence[str] = (),
    return_token_ids: bool = False,
    parallel: bool = True,
    forced: bool = False,
    every_token: bool = False,
) -> AnswerSpec:
    """Return the engine's request with the reader of its answer. The arguments are those of AnswerReader."""
    shown_ids = frozenset(fields.stop_token_ids if fields.include_stop_str_in_output else ())

    def reader() -> AnswerReader:
        return AnswerReader(
            IncrementalDetokenizer(service.vocabulary.decode, request.prompt),
            parser(),
            Stops(tuple(stops), fields.include_stop_str_in_output),
            end_ids=request.stop_token_ids - shown_ids,
            parallel=parallel,
            forced=forced,
            with_tokens=return_token_ids or request.logprobs is not None,
            every_token=every_token,
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
