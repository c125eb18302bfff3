"""The base of all parsers: the driver of a format's grammar, its cursor over the text so far, and the known tools."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ..deltas import ContentDelta
from ..schemas import Places

T = TypeVar("T")

NAME = re.compile(r"[\w.:/-]{1,256}")  # of a tool

# Every reading step is a generator: it yields deltas, or None when it needs more text, and returns what it read.
Reading = Generator[ContentDelta | None, None, T]
Waiting = Generator[None, None, str]


class MalformedError(Exception):
    """The text at the cursor can't be part of a call, or not the part that a reading step is for."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that the model may call: the schemas of their arguments by name."""

    parameters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> Tools:
        """Return the tools from OpenAI's function tools."""
        return cls({tool["function"]["name"]: tool["function"].get("parameters") for tool in tools})

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def __contains__(self, name: str) -> bool:
        return name in self.parameters

    def places(self, name: str) -> Places:
        """Return what may stand in each member of a tool's arguments."""
        return Places(self.parameters.get(name))

    def name(self, raw: str) -> str:
        """Return the tool's name without control tokens and namespaces, which models leak into names.

        Raises:
            MalformedError: this is no name.
        """
        name = raw.strip().partition("<|")[0].strip()
        if name not in self and name.removeprefix("functions.") in self:
            name = name.removeprefix("functions.")
        if not NAME.fullmatch(name):
            raise MalformedError(f"not a name: {raw[:40]!r}")
        return name


class FormatGrammar(Protocol):
    """The grammar of one output format. `thinking` is true while reasoning follows."""

    @property
    def thinking(self) -> bool: ...
    def run(self, cursor: Cursor) -> Reading[None]: ...


class Parser:
    """A parser that feeds one answer to the grammar of its format."""

    def __init__(self, grammar: FormatGrammar) -> None:
        self._grammar = grammar
        self._cursor = Cursor()
        self._deltas = grammar.run(self._cursor)

    @property
    def thinking(self) -> bool:
        return self._grammar.thinking

    def push(self, text: str) -> list[ContentDelta]:
        """Add text and return the deltas that it completes, often none."""
        self._cursor.feed(text)
        return self._ready()

    def finish(self, complete: bool) -> list[ContentDelta]:
        """Return the rest.

        Args:
            complete: True if the model ended its answer itself, False if it was cut off.
        """
        self._cursor.end(complete)
        return self._ready()

    def _ready(self) -> list[ContentDelta]:
        out = []
        for delta in self._deltas:
            if delta is None:
                break
            out.append(delta)
        return out


class Cursor:
    """A reader of text from front to back. A failed attempt can be taken back.

    Attributes:
        buffer: text that is not read yet.
        offset: characters read so far.
        ended: no more text will come; `complete` is then True if the model ended by itself.
    """

    def __init__(self, text: str = "", ended: bool = False) -> None:
        self.buffer = text
        self.offset = 0
        self.ended = self.complete = ended
        self._trail: list[str] = []

    def feed(self, text: str) -> None:
        self.buffer += text

    def end(self, complete: bool) -> None:
        self.ended, self.complete = True, complete

    def take(self, count: int) -> str:
        """Read `count` characters, or as many as there are."""
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        self.offset += len(taken)
        self._trail.append(taken)
        return taken

    def mark(self) -> list[str]:
        """Allow the text from here on to be taken back. Return the text since the mark before."""
        before, self._trail = self._trail, []
        return before

    def unmark(self, before: list[str]) -> str:
        """Return the text since the mark, which is then that since the mark `before`."""
        before.append(self.trail())
        self._trail = before
        return before[-1]

    def trail(self) -> str:
        """The text since the mark."""
        return "".join(self._trail)

    def rewind(self, keep: int) -> None:
        """Unread all but the first `keep` characters since the mark."""
        trail = self.trail()
        self.buffer = trail[keep:] + self.buffer
        self.offset -= len(trail) - keep
        self._trail = [trail[:keep]]


def peek(cursor: Cursor, count: int) -> Waiting:
    """Return the next `count` characters, fewer only at the end."""
    while len(cursor.buffer) < count and not cursor.ended:
        yield
    return cursor.buffer[:count]


def spaces(cursor: Cursor) -> Waiting:
    """Read white space."""
    taken = ""
    while True:
        taken += cursor.take(len(cursor.buffer) - len(cursor.buffer.lstrip()))
        if cursor.buffer or cursor.ended:
            return taken
        yield


def starts_with(cursor: Cursor, marks: Sequence[str]) -> Waiting:
    """Return which of the marks comes next, "" if none does, without reading it."""
    return (yield from ahead(cursor, 0, marks))


def skip(cursor: Cursor, *marks: str) -> Waiting:
    """Read which of the marks comes next, and return it, else "". Half a mark is read where an answer was cut off."""
    mark = yield from starts_with(cursor, marks)
    is_cut = cursor.ended and not cursor.complete and any(one.startswith(cursor.buffer) for one in marks)
    cursor.take(len(cursor.buffer if is_cut else mark))
    return mark


def ahead(cursor: Cursor, at: int, marks: Sequence[str]) -> Waiting:
    """Return which of the marks comes `at` characters later, as `starts_with`. A mark stands before its beginnings."""
    while True:
        text = cursor.buffer[at:]
        if cursor.ended or not any(mark.startswith(text) and mark != text for mark in marks):
            return next((mark for mark in marks if text.startswith(mark)), "")
        yield


def past_spaces(cursor: Cursor, at: int) -> Generator[None, None, int]:
    """Return the place of the first character after `at` that is no white space, without reading up to it."""
    while True:
        text = cursor.buffer
        past = len(text) - len(text[at:].lstrip())
        if past < len(text) or cursor.ended:
            return past
        yield


def find_first(text: str, marks: Collection[str]) -> tuple[int, str]:
    """Return the place of the first mark, and the mark; else how much of `text` certainly precedes one, and ""."""
    places = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(places) if places else (len(text) - overlap(text, marks), "")


def overlap(text: str, marks: Collection[str]) -> int:
    """Return how many characters at the end of `text` may begin a mark."""
    if not marks:  # as in most streams, for each of their tokens
        return 0
    longest = min(len(text), max(map(len, marks)) - 1)
    begins = {mark[0] for mark in marks}
    ends = (n for n in range(longest, 0, -1) if text[-n] in begins)
    return next((n for n in ends if any(mark.startswith(text[-n:]) for mark in marks)), 0)
