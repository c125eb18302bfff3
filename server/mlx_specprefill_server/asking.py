"""Dialect-neutral requests: what every dialect boils down to, and the answers that come back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from mlx_specprefill import (
    Constraint,
    ContextLengthError,
    GenerationRequest,
    InvalidRequestError,
    SamplingParams,
    SpecPrefillOptions,
)

from .answers import AnswerDone, AnswerPiece, TextDelta
from .conversation import Conversation
from .deltas import Delta
from .deps import Service
from .forced_calls import NamedTool, ToolChoice
from .generation import Done, Generation, Job, PromptScores
from .output_format import OutputFormat, constraint_of
from .prompt import Prompt

__all__ = ["Ask", "Asked", "NamedTool", "ToolChoice", "ask", "copies", "room", "stop_ids"]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for answers to a conversation.

    Attributes:
        max_tokens: per answer; None: the remaining context.
        stops: end the visible text; neither they nor what follows is shown.
        output: what the text must look like; None: free text.
        n: answers.
        logprobs: None, or how many alternatives per token (0..20).
        min_tokens: before this many tokens the model can't end its answer.
        field: of the dialect's body; what errors about the prompt name.
    """

    conversation: Conversation
    sampling: SamplingParams
    specprefill: SpecPrefillOptions
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    output: OutputFormat | None = None
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    field: str = "messages"


class Asked:
    """Answers being made. Whoever holds it must close its `generation`, whatever happens."""

    def __init__(self, prompt_tokens: int, generation: Generation) -> None:
        self.prompt_tokens = prompt_tokens
        self.generation = generation

    async def stream(self, idle_after: float) -> AsyncIterator[AnswerPiece]:
        """Every answer's pieces as they come; each answer ends with exactly one AnswerDone.

        Args:
            idle_after: seconds without a piece before an Idle comes.
        """
        async for piece in self.generation.pieces(idle_after):
            match piece:
                case Delta():
                    yield TextDelta(piece.index, piece.text, piece.tokens)
                case Done():
                    yield AnswerDone(
                        piece.index, piece.finish_reason, piece.completion_tokens, 0, piece.account, None, piece.error
                    )
                case PromptScores():
                    pass
                case _:
                    yield piece


async def ask(service: Service, ask: Ask) -> Asked:
    """Renders the conversation and starts its answers.

    Raises:
        InvalidRequestError, ContextLengthError: nothing has been started.
        EngineClosedError: the engine takes nothing more.
    """
    prompt = await service.prompts.chat(ask.conversation)
    constraint = constraint_of(
        ask.output,
        ask.conversation.tools,
        ask.tool_choice,
        parallel=ask.parallel_tool_calls,
        special=service.vocabulary.special,
    )
    await service.compile(constraint)
    return Asked(len(prompt.tokens), service.submit(_jobs(service, ask, prompt, constraint)))


def room(prompt_tokens: int, asked: int | None, context_length: int, field: str) -> int:
    """How long an answer may become. More than fits is cut, not refused: agents ask for their maximum on every call.

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


def _jobs(service: Service, ask: Ask, prompt: Prompt, constraint: Constraint | None) -> Sequence[Job]:
    if not prompt.tokens:
        raise InvalidRequestError(f"{ask.field}: the prompt has no tokens", field=ask.field)
    max_tokens = room(len(prompt.tokens), ask.max_tokens, service.context_length, ask.field)
    request = GenerationRequest(
        prompt=prompt.tokens,
        max_tokens=max_tokens,
        sampling=ask.sampling,
        specprefill=ask.specprefill,
        spans=prompt.spans,
        stop_token_ids=stop_ids(service, ask.ignore_eos, constraint),
        logprobs=ask.logprobs,
        constraint=constraint,
        min_tokens=min(ask.min_tokens, max_tokens),
    )
    return copies(Job(request, ask.stops), ask.n)


def stop_ids(service: Service, ignore_eos: bool, constraint: Constraint | None) -> frozenset[int]:
    """What ends an answer. A grammar ends by itself, so there is nothing to ignore."""
    return frozenset() if ignore_eos and constraint is None else service.vocabulary.stop_ids


def copies(job: Job, n: int, first: int = 0) -> list[Job]:
    """The `n` answers to one prompt; the prompt is read once. `first` is the number of the first among all jobs."""
    others = [replace(job, request=_seeded(job.request, i), follows=first) for i in range(1, n)]
    return [job, *others]


def _seeded(request: GenerationRequest, answer: int) -> GenerationRequest:
    """Answers of one request differ, and each is the same again for the same seed."""
    sampling = request.sampling
    return (
        request if sampling.seed is None else replace(request, sampling=replace(sampling, seed=sampling.seed + answer))
    )
