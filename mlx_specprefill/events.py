"""The events that the engine sends of a request, frozen: tokens, progress, the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .arrays import Bools, Floats
from .prefill_report import PrefillReport, Stage

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of one token under the target's unmodified distribution."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Work done inside a stage, in tokens (`done` of `total`).

    Attributes:
        cached: prompt tokens that the target need not read, besides those `total`; None while that is not known.
    """

    stage: Stage
    done: int
    total: int
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Entry i belongs to prompt token i+1: (its own logprob, the best alternatives). M-1 entries."""

    entries: tuple[tuple[Logprob, tuple[Logprob, ...]], ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. `logprob` and `top_logprobs` are set if the request asked for them.

    `logprob` is also set if the answer will be verified.
    """

    token: int
    logprob: float | None = None
    top_logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """The answers to a request's questions, in their order.

    Attributes:
        probabilities: of each question's labels, float32 (L,), which add up to 1.
        kept: whether the target has read the place at which the draft looks for the question, bool (Q,); None: the
            draft's place is not known.
    """

    probabilities: tuple[Floats, ...]
    kept: Bools | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that did not fail."""

    reason: FinishReason
    completion_tokens: int
    report: PrefillReport


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that failed. The engine goes on with the next one."""

    error: Exception
    report: PrefillReport | None = None


Event = Progress | PromptLogprobs | Decisions | TokenEvent | Finished | Failed
OnEvent = Callable[[Event], None]


def noop(*_: object) -> None:
    """Do nothing, as a callback that nobody wants."""
