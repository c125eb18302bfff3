"""The parts of an answer in every dialect: text, reasoning, tool calls, and exactly one end.

Parsers yield the content; `AnswerReader` adds tokens and the end; a dialect writes each delta to the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias
from uuid import uuid4

if TYPE_CHECKING:  # they bring arrays, and the settings' words are made of notations
    from mlx_specprefill import Decisions, PrefillReport, Progress, PromptLogprobs, TokenEvent

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Visible text.

    Attributes:
        tokens: tokens that begin in the text; only if the request asks for logprobs or token ids.
        start: place of the text among all generated characters, tags included; for the reader only.
        places: the place in the text where each of the tokens begins.
    """

    text: str
    tokens: tuple[TokenEvent, ...] = ()
    start: int = 0
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning before its answer; fields as in TextDelta."""

    text: str
    tokens: tuple[TokenEvent, ...] = ()
    start: int = 0


def new_call_id(written: str = "") -> str:
    """Return an id that no other call has. It ends in what the model has written as the id, at most 9 characters."""
    return f"call_{uuid4().hex[: 24 - len(written)]}{written}"


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call. Calls never overlap: the deltas up to CallEnd or CallBroken belong to this one."""

    name: str
    id: str = field(default_factory=new_call_id)


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of the call's arguments as JSON text, as it is generated."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a complete call. `arguments` is a JSON object: the texts of its CallDeltas together."""

    arguments: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A call that turned out malformed after CallStart. It is not part of the answer, and no CallEnd follows.

    Its raw text follows as TextDelta. Streams close the open block; whole answers leave the call out.
    """


@dataclass(frozen=True, slots=True)
class Idle:
    """A pause without anything to show: time for a keep-alive. It belongs to no particular answer."""


@dataclass(frozen=True, slots=True)
class AnswerDone:
    """The end of an answer. With an `error` the answer is incomplete, and `finish_reason` is "length".

    Attributes:
        completion_tokens: all generated tokens; `reasoning_tokens` of them are reasoning.
        stop_string: which of the request's stop strings ended the text, if one did.
        warnings: sentences about this answer.
    """

    finish_reason: FinishReason
    completion_tokens: int
    reasoning_tokens: int
    report: PrefillReport
    stop_string: str | None = None
    error: Exception | None = None
    warnings: tuple[str, ...] = ()


ContentDelta = TextDelta | ReasoningDelta | CallStart | CallDelta | CallEnd | CallBroken
AnswerDelta: TypeAlias = "ContentDelta | Progress | PromptLogprobs | Decisions | Idle | AnswerDone"
