"""What both endpoints of OpenAI's dialect write the same way: envelope, progress, jobs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from mlx_specprefill import Constraint, GenerationRequest, InvalidRequestError, Logprob, SamplingParams, TokenEvent

from .. import __version__
from ..asking import room, shown_ids, stop_ids
from ..deps import Service
from ..generating.deltas import Stops
from ..generating.generation import Job, Working
from ..generating.vocabulary import Vocabulary
from ..prompting.prompt import Prompt
from .schemas import GenerationFields

__all__ = ["Envelope", "make_job", "progress", "scored"]

LOWEST_LOGPROB = -9999.0  # JSON has no -inf


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk of one response shares."""

    id: str
    object: str
    model: str
    created: int
    null_usage: bool = False  # OpenAI's streams carry "usage": null until the last chunk when usage is asked for

    @classmethod
    def new(cls, prefix: str, kind: str, model: str, null_usage: bool = False) -> Envelope:
        return cls(f"{prefix}-{uuid4().hex}", kind, model, int(time.time()), null_usage)

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A whole response or one chunk."""
        head = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        usage = {"usage": None} if self.null_usage else {}
        return {**head, "system_fingerprint": f"mlx-specprefill-{__version__}", "choices": choices, **usage, **more}


def make_job(
    service: Service,
    body: GenerationFields,
    prompt: Prompt,
    asked: int | None,
    field: str,
    sampling: SamplingParams,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    constraint: Constraint | None = None,
) -> Job:
    """One answer to `prompt`, as long as was asked for and fits.

    Raises:
        InvalidRequestError: an empty prompt, or one that leaves no room for an answer.
    """
    if asked == 0 and prompt_logprobs is None:
        prompt_logprobs = 0  # an echo without an answer: the engine runs no request that asks for nothing
    if not prompt.tokens:
        raise InvalidRequestError(f"{field}: the prompt has no tokens", field=field)
    max_tokens = room(len(prompt.tokens), asked, service.context_length, field)
    request = GenerationRequest(
        prompt=prompt.tokens,
        max_tokens=max_tokens,
        sampling=sampling,
        specprefill=body.options(),
        spans=prompt.spans,
        stop_token_ids=stop_ids(service, body, constraint),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
        min_tokens=min(body.min_tokens, max_tokens),
    )
    stops = Stops(body.stop, body.include_stop_str_in_output)
    return Job(request, stops, shown_ids(body), with_tokens=body.return_token_ids)


def progress(piece: Working, started: float) -> dict[str, Any]:
    """llama.cpp's progress object, in which `processed` includes `cache`.

    `stage` says of which model it speaks: the draft reads the whole prompt, the target what is cached or was selected.
    """
    elapsed = round((time.monotonic() - started) * 1000)
    cached = piece.cached or 0
    if piece.stage == "prefill":
        total, processed = piece.total + cached, piece.done + cached
    else:
        total, processed = piece.total, max(piece.done, cached)
    return {"total": total, "cache": cached, "processed": processed, "time_ms": elapsed, "stage": piece.stage}


def scored(vocabulary: Vocabulary, event: TokenEvent) -> dict[str, Any]:
    """A token as an entry of OpenAI's logprobs."""
    own = Logprob(event.token, LOWEST_LOGPROB if event.logprob is None else event.logprob)
    return _entry(vocabulary, own) | {"top_logprobs": [_entry(vocabulary, other) for other in event.top_logprobs]}


def _entry(vocabulary: Vocabulary, one: Logprob) -> dict[str, Any]:
    return {
        "token": vocabulary.token_text(one.token),
        "logprob": max(one.logprob, LOWEST_LOGPROB),
        "bytes": vocabulary.token_bytes(one.token),
    }
