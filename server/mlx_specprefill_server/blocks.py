"""Joins the deltas of an answer into blocks: each dialect names the events of one that opens, grows and closes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from .deltas import AnswerDelta, CallBroken, CallDelta, CallEnd, CallStart, ReasoningDelta, TextDelta

if TYPE_CHECKING:
    from mlx_specprefill import TokenEvent

INPUT = "input"  # the only argument of a custom tool
_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}"  # of two escapes, one character
_PARTS = re.compile(rf'(?:[^"\\]|{_PAIR}|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|\\[^u])+')

Kind = Literal["text", "reasoning", "call", "custom"]
End = Literal["whole", "cut", "broken"]


class InputText:
    """A reader of the input in a call's arguments, as their text comes. Together its pieces are the input."""

    def __init__(self) -> None:
        self._waiting = ""
        self._begun = False

    def push(self, text: str) -> str:
        """Add JSON text and return what it says of an input that is a text and stands first."""
        self._waiting += text
        if not self._begun:
            match = _BEGIN.match(self._waiting)
            if match is None:
                return ""
            self._begun, self._waiting = True, self._waiting[match.end() :]
        parts = _PARTS.match(self._waiting)
        if parts is None:
            return ""
        self._waiting = self._waiting[parts.end() :]
        return str(json.loads(f'"{parts[0]}"', strict=False))

    def end(self) -> str:
        """Return the input of a complete call that stood elsewhere. Arguments without one are passed on as they are."""
        if self._begun:
            return ""
        value = json.loads(self._waiting, parse_int=float).get(INPUT)  # whatever the number, it is no text
        return value if isinstance(value, str) else self._waiting


@dataclass(slots=True)
class Block:
    """A part of an answer.

    Attributes:
        index: its place among all that have opened.
        id, name: of a call.
        texts: the pieces so far; of a "custom" tool's call its input, of another call its arguments as JSON.
        end: None while it is open; "cut" by the answer's end, or "broken": no part of the answer.
    """

    kind: Kind
    index: int
    id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    end: End | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Step(NamedTuple):
    """A block opens, gets a piece of its text with the tokens that begin there, or closes."""

    event: Literal["open", "piece", "close"]
    block: Block
    text: str = ""
    tokens: tuple[TokenEvent, ...] = ()


class Blocks:
    """Turns the deltas of one answer into blocks, of which at most one is open at a time.

    Args:
        custom: the names of tools whose calls are plain texts.

    Attributes:
        all: every block, the open one last.
    """

    _input: InputText  # of the last call

    def __init__(self, custom: frozenset[str] = frozenset()) -> None:
        self.all: list[Block] = []
        self._custom = custom

    @property
    def open(self) -> Block | None:
        return self.all[-1] if self.all and self.all[-1].end is None else None

    def push(self, delta: AnswerDelta) -> Iterator[Step]:
        """Return what one delta opens, says and closes."""
        match delta:
            case TextDelta() if delta.text or self._is_open("text"):  # tokens of tags alone make no text
                yield from self.say("text", delta.text, delta.tokens)
            case ReasoningDelta() if delta.text:
                yield from self.say("reasoning", delta.text)
            case CallStart():
                self._input = InputText()
                kind: Kind = "custom" if delta.name in self._custom else "call"
                yield from self._open(kind, delta.id, delta.name)
            case CallDelta():
                yield from self._call_text(self._input.push(delta.text) if self._is_open("custom") else delta.text)
            case CallEnd():
                yield from self._call_text(self._input.end() if self._is_open("custom") else "")
                yield from self.close()
            case CallBroken():
                yield from self.close("broken")

    def say(self, kind: Kind, text: str, tokens: tuple[TokenEvent, ...] = ()) -> Iterator[Step]:
        """Add text to the open block of a kind. Without one it opens a new one."""
        if not self._is_open(kind):
            yield from self._open(kind)
        self.all[-1].texts.append(text)
        yield Step("piece", self.all[-1], text, tokens)

    def close(self, end: End = "whole") -> Iterator[Step]:
        """Close the open block, if there is one."""
        if (block := self.open) is not None:
            block.end = end
            yield Step("close", block)

    def _is_open(self, kind: Kind) -> bool:
        return self.open is not None and self.all[-1].kind == kind

    def _open(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Step]:
        yield from self.close()
        self.all.append(Block(kind, len(self.all), call_id, name))
        yield Step("open", self.all[-1])

    def _call_text(self, text: str) -> Iterator[Step]:
        if text:
            yield from self.say(self.all[-1].kind, text)
