"""What both endpoints of OpenAI's dialect write the same way: envelope, usage, account, timings, jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from uuid import uuid4

from mlx_specprefill import (
    Account,
    ContextLengthError,
    EngineError,
    GenerationRequest,
    InvalidRequestError,
    SpecPrefillError,
    Timings,
)

from .. import __version__
from ..deps import Service
from ..errors import api_error
from ..generation import Done, Job, Working
from ..prompt import Prompt
from .schemas import GenerationFields

__all__ = ["Envelope", "Report", "make_job", "progress"]

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
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> Job:
    """One answer to `prompt`, as long as was asked for and fits.

    Raises:
        InvalidRequestError: an empty prompt, or one that leaves no room for an answer.
    """
    if asked == 0 and prompt_logprobs is None:
        prompt_logprobs = 0  # an echo without an answer: the engine runs no request that asks for nothing
    if not prompt.tokens:
        raise InvalidRequestError(f"{field}: the prompt has no tokens", field=field)
    vocabulary = service.vocabulary
    request = GenerationRequest(
        prompt=prompt.tokens,
        max_tokens=_room(len(prompt.tokens), asked, service.context_length, field),
        sampling=body.sampling(service.settings.temperature, vocabulary.size),
        specprefill=body.options(),
        spans=prompt.spans,
        stop_token_ids=frozenset() if body.ignore_eos else vocabulary.stop_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return Job(request, body.stop)


def _room(prompt_tokens: int, asked: int | None, context_length: int, field: str) -> int:
    """More than fits is cut, not refused: agents ask for their maximum on every call."""
    room = context_length - prompt_tokens
    least = 0 if asked == 0 else 1
    if room < least:
        error = ContextLengthError(prompt_tokens, least, context_length)
        error.field = field
        raise error
    return room if asked is None else min(asked, room)


def progress(piece: Working, started: float) -> dict[str, Any]:
    """llama.cpp's progress object; `stage` says of which of the two models it speaks."""
    elapsed = round((time.monotonic() - started) * 1000)
    return {"total": piece.total, "cache": 0, "processed": piece.done, "time_ms": elapsed, "stage": piece.stage}


class Report:
    """Collects the ends of all answers of one response, and writes what goes next to `usage`."""

    def __init__(self, prompt_tokens: int, answers: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._open = answers
        self._ends: list[Done] = []

    def add(self, end: Done) -> bool:
        """True when it was the last one."""
        self._ends.append(end)
        return len(self._ends) == self._open

    def raise_error(self) -> None:
        """For responses whose status is still to be chosen.

        Raises:
            SpecPrefillError: the first failure among the answers.
        """
        if (error := self._error()) is not None:
            raise error

    def usage(self) -> dict[str, Any]:
        """Counts the full prompt whatever the target saw of it."""
        completion = sum(end.completion_tokens for end in self._ends)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": sum(end.account.cached_tokens for end in self._ends)},
        }

    def extras(self) -> dict[str, Any]:
        """The account of the prefill, llama.cpp's timings, and what went wrong, if anything did."""
        account = _merged([end.account for end in self._ends])
        completion = sum(end.completion_tokens for end in self._ends)
        extras = {"specprefill": account.to_dict(), "timings": _timings(account, completion)}
        error = self._error()
        return extras | ({} if error is None else {"engine_error": api_error(error).body()["error"]})

    def _error(self) -> SpecPrefillError | None:
        """The first failure; whatever is not the library's own becomes an EngineError."""
        failed = next((end.error for end in self._ends if end.error is not None), None)
        if failed is None or isinstance(failed, SpecPrefillError):
            return failed
        error = EngineError(f"the engine failed on this request: {failed}")
        error.__cause__ = failed
        return error


def _merged(accounts: Sequence[Account]) -> Account:
    """One account for several prompts: counts and times are sums."""
    if len(accounts) == 1:
        return accounts[0]
    sparse = any(account.mode == "sparse" for account in accounts)
    prompt_tokens = sum(account.prompt_tokens for account in accounts)
    kept_tokens = sum(account.kept_tokens for account in accounts)
    times = {f.name: sum(getattr(account.timings, f.name) for account in accounts) for f in fields(Timings)}
    return replace(
        accounts[0],
        mode="sparse" if sparse else "full",
        reason="; ".join(dict.fromkeys(account.reason for account in accounts)),
        prompt_tokens=prompt_tokens,
        kept_tokens=kept_tokens,
        cached_tokens=sum(account.cached_tokens for account in accounts),
        keep_pct=kept_tokens / prompt_tokens if sparse else None,
        continuation=None,
        timings=Timings(**times),
        kept_spans=None,
    )


def _timings(account: Account, predicted: int) -> dict[str, Any]:
    times = account.timings
    prompt_ms = times.draft_ms + times.select_ms + times.prefill_ms
    prompt = account.prompt_tokens - account.cached_tokens
    return {
        "cache_n": account.cached_tokens,
        **_rates("prompt", prompt, prompt_ms),
        **_rates("predicted", predicted, times.decode_ms),
    }


def _rates(name: str, count: int, ms: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": round(ms, 3),
        f"{name}_per_token_ms": round(ms / count, 3) if count else 0.0,
        f"{name}_per_second": round(count / ms * 1000, 3) if ms else 0.0,
    }
