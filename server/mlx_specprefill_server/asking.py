"""Dialect-neutral requests: what every dialect boils down to, and the answers that come back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlx_specprefill import (
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
from .generation import Done, Generation, Job, PromptScores
from .prompt import Prompt

__all__ = ["Ask", "Asked", "NamedTool", "ToolChoice", "ask", "room"]


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that has to be called."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


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
    output: Any | None = None
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
    return Asked(len(prompt.tokens), service.submit(_jobs(service, ask, prompt)))


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


def _jobs(service: Service, ask: Ask, prompt: Prompt) -> Sequence[Job]:
    if not prompt.tokens:
        raise InvalidRequestError(f"{ask.field}: the prompt has no tokens", field=ask.field)
    request = GenerationRequest(
        prompt=prompt.tokens,
        max_tokens=room(len(prompt.tokens), ask.max_tokens, service.context_length, ask.field),
        sampling=ask.sampling,
        specprefill=ask.specprefill,
        spans=prompt.spans,
        stop_token_ids=frozenset() if ask.ignore_eos else service.vocabulary.stop_ids,
        logprobs=ask.logprobs,
    )
    return [Job(replace(request, sampling=_seeded(ask.sampling, i)), ask.stops) for i in range(ask.n)]


def _seeded(sampling: SamplingParams, answer: int) -> SamplingParams:
    """Answers of one request differ, and each is the same again for the same seed."""
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + answer)
