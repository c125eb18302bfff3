"""What an answer is made of, whatever the dialect: text, reasoning, tool calls, and exactly one end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlx_specprefill import Account, TokenEvent

from .generation import Idle, Working

__all__ = [
    "AnswerDone",
    "AnswerPiece",
    "CallBroken",
    "CallDelta",
    "CallEnd",
    "CallStart",
    "FinishReason",
    "Idle",
    "ReasoningDelta",
    "TextDelta",
    "Working",
]


FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Visible text of answer `index`, and the tokens that begin in it (only when logprobs are asked for)."""

    index: int
    text: str
    tokens: tuple[TokenEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """What the model thinks before it answers; `tokens` as in TextDelta."""

    index: int
    text: str
    tokens: tuple[TokenEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class CallStart:
    """Tool call number `call` (0, 1, 2... within the answer) begins. `id` is unique: "call_..."."""

    index: int
    call: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of the call's arguments as JSON text, as it is generated."""

    index: int
    call: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is whole. `arguments` is a JSON object, the deltas put together."""

    index: int
    call: int
    arguments: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The call went wrong after it had begun: it is not part of the answer, and no CallEnd follows.

    Its raw text follows as TextDelta. Streams close what they had opened; whole answers leave the call out.
    """

    index: int
    call: int


@dataclass(frozen=True, slots=True)
class AnswerDone:
    """The end of answer `index`. With an `error` the answer is incomplete, and `finish_reason` is "length".

    Attributes:
        completion_tokens: all generated tokens; `reasoning_tokens` of them were thought.
        stop_string: which of the request's stop strings ended the text, if one did.
    """

    index: int
    finish_reason: FinishReason
    completion_tokens: int
    reasoning_tokens: int
    account: Account
    stop_string: str | None = None
    error: Exception | None = None


AnswerPiece = TextDelta | ReasoningDelta | CallStart | CallDelta | CallEnd | CallBroken | Working | Idle | AnswerDone
