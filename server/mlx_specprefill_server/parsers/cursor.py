"""The place up to which an answer has been read, and the text behind it that has come so far."""

from __future__ import annotations

from collections.abc import Generator, Sequence

__all__ = ["Cursor", "Waiting", "ahead", "overlap", "peek", "spaces", "starts_with"]

Waiting = Generator[None, None, str]


class Cursor:
    """Text that is read once, from front to back, except that a failed attempt can be taken back.

    Attributes:
        buffer: what has come and is not read yet.
        offset: characters read so far.
        ended: nothing more will come; `complete` then tells whether the model ended by itself.
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
        """Reads `count` characters, or what there is."""
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        self.offset += len(taken)
        self._trail.append(taken)
        return taken

    def mark(self) -> None:
        """From here on, text can be taken back."""
        self._trail = []

    def trail(self) -> str:
        """What was read since the mark."""
        return "".join(self._trail)

    def rewind(self, keep: int) -> None:
        """Unreads all but the first `keep` characters since the mark."""
        trail = self.trail()
        self.buffer = trail[keep:] + self.buffer
        self.offset -= len(trail) - keep
        self._trail = [trail[:keep]]


def peek(cursor: Cursor, count: int) -> Waiting:
    """The next `count` characters; fewer only at the end."""
    while len(cursor.buffer) < count and not cursor.ended:
        yield
    return cursor.buffer[:count]


def spaces(cursor: Cursor) -> Waiting:
    """Reads white space up to something else or the end."""
    taken = ""
    while True:
        taken += cursor.take(len(cursor.buffer) - len(cursor.buffer.lstrip()))
        if cursor.buffer or cursor.ended:
            return taken
        yield


def starts_with(cursor: Cursor, marks: Sequence[str]) -> Waiting:
    """Which of the marks comes next, without reading it; empty: none."""
    return (yield from ahead(cursor, 0, marks))


def ahead(cursor: Cursor, at: int, marks: Sequence[str]) -> Waiting:
    """As `starts_with`, for what comes `at` characters later."""
    while True:
        text = cursor.buffer[at:]
        for mark in marks:
            if text.startswith(mark):
                return mark
        if cursor.ended or not any(mark.startswith(text) for mark in marks):
            return ""
        yield


def overlap(text: str, marks: Sequence[str]) -> int:
    """How much of the end of `text` may be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)
