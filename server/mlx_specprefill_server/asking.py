"""Dialect-neutral requests: what every dialect boils down to, and the answers that come back."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from mlx_specprefill import (
    Constraint,
    ContextLengthError,
    GenerationRequest,
    InvalidRequestError,
    SamplingParams,
    SpecPrefillOptions,
)

from .callers import Caller
from .constrained.output_format import OutputFormat, constraint_of
from .constrained.tool_choice import ToolChoice, offered
from .deps import Service
from .drawing import DrawingFields
from .generating.answers import AnswerDone, AnswerPiece
from .generating.deltas import Delta, Stops
from .generating.generation import Done, Generation, Idle, Job, Working
from .generating.reading import AnswerReader
from .prompting.conversation import Conversation
from .prompting.prompt import Prompt

__all__ = ["Ask", "Asked", "ask", "copies", "counted", "room", "sampling_of", "shown_ids", "stop_ids"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for answers to a conversation.

    Attributes:
        max_tokens: per answer; None: the remaining context.
        stops: end the visible text; neither they nor what follows is shown.
        output: what the text must look like; None: free text.
        drawing: how tokens are drawn, and which of them end an answer.
        thinking_budget: how many tokens of reasoning an answer may have; None: as many as it likes.
        n: answers.
        logprobs: None, or how many alternatives per token (0..20).
    """

    conversation: Conversation
    drawing: DrawingFields
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
        """Whether the answer has to be calls."""
        return self.tool_choice not in ("auto", "none")


class Asked:
    """Answers being made. Whoever holds it must close its `generation`, whatever happens.

    Attributes:
        warnings: what of the request is not done, in sentences.
    """

    def __init__(
        self,
        prompt: tuple[int, ...],
        generation: Generation,
        readers: Sequence[AnswerReader],
        warnings: Sequence[str] = (),
    ) -> None:
        self.prompt = prompt
        self.warnings = warnings
        self.generation = generation
        self._readers = readers
        self._written = [0] * len(readers)
        self._ids: list[list[int]] = [[] for _ in readers]

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    def new_ids(self, index: int) -> list[int]:
        """The ids of answer `index` that came since the last call; only with `return_token_ids`."""
        ids, self._ids[index] = self._ids[index], []
        return ids

    @property
    def written(self) -> int:
        """Tokens of all answers that the stream has got to."""
        return sum(self._written)

    async def stream(self, idle_after: float) -> AsyncIterator[AnswerPiece]:
        """Every answer's pieces as they come; each answer ends with exactly one AnswerDone.

        Args:
            idle_after: seconds without a piece before an Idle comes, also while text comes that can't be shown yet.
        """
        shown_at = monotonic()
        async for piece in self.generation.pieces(idle_after):
            parts: list[AnswerPiece] = []
            match piece:
                case Delta() | Done():
                    parts = self._read(piece)
                case Working() | Idle():
                    parts = [piece]
            if not parts and monotonic() - shown_at >= idle_after:
                parts = [Idle()]
            if parts and not isinstance(piece, Working):  # most clients don't see those
                shown_at = monotonic()
            for part in parts:
                yield part

    def _read(self, piece: Delta | Done) -> list[AnswerPiece]:
        """The error ring of parsing: the answer ends, the others go on."""
        reader = self._readers[piece.index]
        try:
            if isinstance(piece, Done):
                return self._ended(reader.finish(piece), piece.index)
            self._written[piece.index] = piece.completion_tokens
            self._ids[piece.index] += [event.token for event in piece.tokens]
            pieces = reader.push(piece)
        except Exception as error:
            logger.exception("an answer could not be parsed")
            end = replace(piece, error=error) if isinstance(piece, Done) else self.generation.lose(piece.index, error)
            return [reader.failed(end)]
        if reader.over:
            self.generation.halt(piece.index)
        return pieces

    def _ended(self, pieces: list[AnswerPiece], index: int) -> list[AnswerPiece]:
        if isinstance(pieces[-1], AnswerDone) and pieces[-1].finish_reason == "tool_calls":
            self.generation.expect_more(index)
        return pieces


async def ask(service: Service, ask: Ask, caller: Caller, cache_salt: str | None) -> Asked:
    """Renders the conversation and starts its answers.

    Raises:
        InvalidRequestError, ContextLengthError: nothing has been started.
        EngineClosedError: the engine takes nothing more.
    """
    tools, choice = offered(ask.conversation.tools, ask.tool_choice)
    ask = replace(ask, conversation=replace(ask.conversation, tools=tools), tool_choice=choice)
    sampling = await sampling_of(service, ask.drawing)
    prompt = await service.prompts.chat(ask.conversation)
    warnings: list[str] = []
    constraint = _constraint(service, ask, prompt, warnings)
    await service.compile(constraint)
    generation = service.submit(_jobs(service, ask, sampling, prompt, constraint), caller, cache_salt)
    readers = [_reader(service, ask, prompt, i) for i in range(ask.n)]
    return Asked(prompt.tokens, generation, readers, warnings)


async def sampling_of(service: Service, drawing: DrawingFields) -> SamplingParams:
    """How tokens are drawn, as the engine wants it; a word is forbidden as it is written in a text and at its start.

    Raises:
        InvalidRequestError: names the field.
    """
    params = drawing.sampling(service.settings.temperature, service.vocabulary)
    words = [text for word in drawing.bad_words for text in (word.lstrip(), f" {word.lstrip()}")]
    ids = [await service.prompts.tokens(word, special=False, field="bad_words") for word in words]
    return replace(params, bad_words=tuple(dict.fromkeys(filter(None, ids))))


async def counted(service: Service, conversation: Conversation, choice: ToolChoice) -> int:
    """How many tokens the prompt has that `ask` would make.

    Raises:
        InvalidRequestError: the conversation or the choice is at fault.
    """
    tools, _ = offered(conversation.tools, choice)
    return len((await service.prompts.chat(replace(conversation, tools=tools))).tokens)


def _constraint(service: Service, ask: Ask, prompt: Prompt, warnings: list[str]) -> Constraint | None:
    """A forced call can be demanded of any model; one whose template has no format for calls writes the commonest."""
    return constraint_of(
        ask.output,
        ask.conversation.tools,
        ask.tool_choice,
        service.format.tools or ("hermes" if ask.forced else None),
        ask.parallel_tool_calls,
        service.format.reasoning_end(prompt.ending),
        service.vocabulary.special,
        warnings,
    )


def _reader(service: Service, ask: Ask, prompt: Prompt, index: int) -> AnswerReader:
    parser = service.format.parser(ask.conversation.tools, prompt.ending)
    stops = Stops(ask.stops, ask.drawing.include_stop_str_in_output)
    return AnswerReader(index, parser, stops, ask.parallel_tool_calls, ask.forced)


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


def _jobs(
    service: Service, ask: Ask, sampling: SamplingParams, prompt: Prompt, constraint: Constraint | None
) -> Sequence[Job]:
    field = ask.conversation.field
    if not prompt.tokens:
        raise InvalidRequestError(f"{field}: the prompt has no tokens", field=field)
    max_tokens = room(len(prompt.tokens), ask.max_tokens, service.context_length, field)
    request = GenerationRequest(
        prompt=prompt.tokens,
        max_tokens=max_tokens,
        sampling=sampling,
        specprefill=ask.specprefill,
        spans=prompt.spans,
        stop_token_ids=stop_ids(service, ask.drawing, constraint),
        logprobs=ask.logprobs,
        constraint=constraint,
        reasoning=None if ask.thinking_budget is None else service.format.budget(ask.thinking_budget, prompt.ending),
        min_tokens=min(ask.drawing.min_tokens, max_tokens),
    )
    job = Job(request, with_tokens=ask.return_token_ids, shown_ids=shown_ids(ask.drawing))
    return copies(job, ask.n)


def stop_ids(service: Service, drawing: DrawingFields, constraint: Constraint | None) -> frozenset[int]:
    """What ends an answer. A grammar ends by itself, so there is nothing to ignore."""
    own = frozenset(drawing.stop_token_ids)
    if drawing.ignore_eos and constraint is None:
        return own
    return own | service.vocabulary.stop_ids | service.format.ends


def shown_ids(drawing: DrawingFields) -> frozenset[int]:
    """Those of them whose text is part of the answer."""
    return frozenset(drawing.stop_token_ids if drawing.include_stop_str_in_output else ())


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
