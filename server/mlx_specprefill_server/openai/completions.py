"""POST /v1/completions: raw prompts, one answer each, with echo and logprobs as evaluation tools use them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from mlx_specprefill import InvalidRequestError, Logprob, TokenEvent

from ..deltas import Delta
from ..deps import Service, ServiceDep, body_of, unless_client_leaves
from ..errors import JsonResponse
from ..generation import Done, Generation, Idle, Job, Piece, PromptScores, Working
from ..prompt import Prompt
from ..report import Report
from ..sse import DONE, KEEP_ALIVE, EventStream, data
from ..vocabulary import Vocabulary
from .schemas import CompletionRequest, refuse_completion
from .wire import LOWEST_LOGPROB, Envelope, make_job, progress

__all__ = ["router"]

router = APIRouter()

Scores = tuple[tuple[Logprob, tuple[Logprob, ...]], ...]


@router.post("/v1/completions")
async def create(
    request: Request,
    service: ServiceDep,
    body: Annotated[CompletionRequest, Depends(body_of(CompletionRequest, refuse_completion))],
) -> Response:
    """Continues one or several prompts."""
    jobs = [_job(service, body, await _prompt(service, prompt)) for prompt in body.prompt]
    generation = service.submit(jobs)
    answer = CompletionAnswer(service, body, jobs)
    if body.stream:
        return EventStream(answer.stream(generation), generation)
    return JsonResponse(await unless_client_leaves(request, generation, answer.collect(generation)))


async def _prompt(service: Service, prompt: str | tuple[int, ...]) -> Prompt:
    if isinstance(prompt, str):
        return await service.prompts.raw(prompt)
    size = service.vocabulary.size
    if not all(0 <= token < size for token in prompt):
        raise InvalidRequestError(f"prompt: token ids must be from 0 to {size - 1}", field="prompt")
    return Prompt(prompt)


def _job(service: Service, body: CompletionRequest, prompt: Prompt) -> Job:
    prompt_logprobs = body.logprobs if body.echo else None
    return make_job(service, body, prompt, body.limit(), "prompt", body.logprobs, prompt_logprobs)


@dataclass(slots=True)
class _Choice:
    """One answer: the prompt still to be echoed (None: nothing, or done), and what is written so far."""

    index: int
    echo: str | None
    prompt: tuple[int, ...]
    text: str = ""
    length: int = 0  # characters of all token texts, for text_offset
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str | None = None


class CompletionAnswer:
    """Writes the answers of one request to the wire."""

    def __init__(self, service: Service, body: CompletionRequest, jobs: Sequence[Job]) -> None:
        self._vocabulary = service.vocabulary
        self._keep_alive = service.settings.keep_alive_s
        self._body = body
        prompts = [job.request.prompt for job in jobs]
        texts = [text if isinstance(text, str) else self._vocabulary.decode(text) for text in body.prompt]
        self._choices = [
            _Choice(i, text if body.echo else None, prompt)
            for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        ]
        self._prompt_tokens = sum(map(len, prompts))
        self._report = Report(self._prompt_tokens, len(jobs))
        self._envelope = Envelope.new("cmpl", "text_completion", body.model or service.model_id)

    async def collect(self, generation: Generation) -> dict[str, Any]:
        """All answers.

        Raises:
            SpecPrefillError: the engine failed on one of them or was stopped.
        """
        async for piece in generation.pieces(self._keep_alive):
            for choice, text, logprobs in self._written(piece):
                choice.text += text
                for name, values in (logprobs or {}).items():
                    choice.logprobs.setdefault(name, []).extend(values)
            if isinstance(piece, Done):
                self._choices[piece.index].finish_reason = piece.finish_reason
                self._report.add(piece)
        self._report.raise_error()
        choices = [self._choice(c, c.text, self._all_logprobs(c), c.finish_reason) for c in self._choices]
        return self._envelope.body(choices, usage=self._report.usage(), **self._report.extras())

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answers as they are made, interleaved."""
        started = time.monotonic()
        self._envelope = replace(self._envelope, null_usage=self._body.stream_options.include_usage)
        for choice in self._choices:
            yield self._chunk(choice, "")
        if self._body.return_progress:
            yield self._progress(Working(0, "queued", 0, self._prompt_tokens), started)
        async for piece in generation.pieces(self._keep_alive):
            for choice, text, logprobs in self._written(piece):
                yield self._chunk(choice, text, logprobs)
            match piece:
                case Idle():
                    yield KEEP_ALIVE
                case Working() if self._body.return_progress:
                    yield self._progress(piece, started)
                case Done():
                    for last in self._ending(piece):
                        yield last
        yield DONE

    def _written(self, piece: Piece) -> list[tuple[_Choice, str, dict[str, list[Any]] | None]]:
        """What a piece adds to an answer: the echoed prompt before anything else, then new text."""
        if isinstance(piece, Idle | Working):
            return []
        choice = self._choices[piece.index]
        out = []
        if choice.echo is not None:
            scores = piece.entries if isinstance(piece, PromptScores) else ()
            out.append((choice, choice.echo, self._prompt_logprobs(choice, scores)))
            choice.echo = None
        if isinstance(piece, Delta):
            out.append((choice, piece.text, self._logprobs(choice, piece.tokens)))
        return out

    def _ending(self, end: Done) -> list[bytes]:
        """The finish chunk; after the last one usage, if asked for. The account rides in whichever is last."""
        last = self._report.add(end)
        finish = [self._choice(self._choices[end.index], "", None, end.finish_reason)]
        if not last:
            return [data(self._envelope.body(finish))]
        if not self._body.stream_options.include_usage:
            return [data(self._envelope.body(finish, **self._report.extras()))]
        usage = self._envelope.body([], **{"usage": self._report.usage()}, **self._report.extras())
        return [data(self._envelope.body(finish)), data(usage)]

    def _chunk(self, choice: _Choice, text: str, logprobs: dict[str, list[Any]] | None = None) -> bytes:
        return data(self._envelope.body([self._choice(choice, text, logprobs, None)]))

    def _choice(
        self, choice: _Choice, text: str, logprobs: dict[str, list[Any]] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _progress(self, piece: Working, started: float) -> bytes:
        return data(self._envelope.body([], prompt_progress=progress(piece, started)))

    def _all_logprobs(self, choice: _Choice) -> dict[str, list[Any]] | None:
        if self._body.logprobs is None:
            return None
        return choice.logprobs or self._logprobs(choice, ())

    def _prompt_logprobs(self, choice: _Choice, scores: Scores) -> dict[str, list[Any]] | None:
        """The first prompt token has no logprob: nothing precedes it."""
        if self._body.logprobs is None:
            return None
        first = TokenEvent(choice.prompt[0])
        return self._logprobs(choice, [first, *(TokenEvent(own.token, own.logprob, top) for own, top in scores)])

    def _logprobs(self, choice: _Choice, tokens: Sequence[TokenEvent]) -> dict[str, list[Any]] | None:
        if self._body.logprobs is None:
            return None
        texts = [self._vocabulary.token_text(event.token) for event in tokens]
        offsets = []
        for text in texts:
            offsets.append(choice.length)
            choice.length += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if e.logprob is None else max(e.logprob, LOWEST_LOGPROB) for e in tokens],
            "top_logprobs": [_top(self._vocabulary, event) for event in tokens],
            "text_offset": offsets,
        }


def _top(vocabulary: Vocabulary, event: TokenEvent) -> dict[str, float] | None:
    """The alternatives and the token itself, as OpenAI counts them; the likelier of two with one text wins."""
    if event.logprob is None:
        return None
    scored = sorted((*event.top_logprobs, Logprob(event.token, event.logprob)), key=lambda one: one.logprob)
    return {vocabulary.token_text(one.token): max(one.logprob, LOWEST_LOGPROB) for one in scored}
