"""Answers with reasoning and calls between tags within the text, as most model families write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..deltas import CallBroken, CallEnd, CallStart, ContentDelta, ReasoningDelta, TextDelta
from .base import Cursor, MalformedError, Reading, Tools, find_first, overlap, skip, spaces, starts_with
from .call_parts import END_CALL, FENCE, CallReader, fence
from .code import Code

# the deltas of one whole call
Call = list[ContentDelta]

# characters; a longer failed call is not searched for others, or reading could take quadratic time
LONGEST_RETRY = 4096


class Bare(NamedTuple):
    """Calls without a tag. Not within reasoning, where models sketch calls.

    Attributes:
        start: how one begins at the start of a text.
        anywhere: how one begins behind other text. It counts only if it ends the answer.
    """

    read: CallReader
    start: tuple[str, ...]
    anywhere: tuple[str, ...]


class TaggedText:
    """A divider of tagged text into deltas.

    White space that templates put around reasoning and calls is dropped, but between text before and after a call.

    Args:
        think: the tags around reasoning; None: the model writes none.
        thinking: the prompt has opened the reasoning; `begun`: it also holds the start of it.
        openers: the tags that begin a call, each with its reader; none without tools.
        bare: calls without a tag; None without tools.
        again: reasoning may be opened again, and no text holds its tags.
        around: marks around text, which are left out.
    """

    def __init__(
        self,
        tools: Tools,
        think: tuple[str, str] | None,
        thinking: bool,
        openers: Mapping[str, CallReader],
        bare: Bare | None = None,
        *,
        begun: bool = False,
        again: bool = False,
        around: tuple[str, ...] = (),
    ) -> None:
        self.thinking = thinking
        self._begun = thinking and begun
        self._tools = tools
        self._think = think
        self._closing = think[1:] if think else ()
        bares = dict.fromkeys(bare.start, bare.read) if bare else {}
        self._bare = bare.anywhere if bare else ()
        self._readers = {**openers, **(dict.fromkeys(bare.anywhere, bare.read) if bare else {})}
        self._firsts = {**self._readers, **bares}  # at the beginning of a text
        self._begins = [*bares, *(mark for mark in openers if mark.startswith(FENCE)), FENCE] if tools else []
        self._stray = think if think and again else ()
        self._around = around
        # by whether the text is reasoning
        self._marks = {
            False: [*self._readers, *self._stray, *around],
            True: [*openers, *(self._stray or self._closing)],
        }
        self._held: TextDelta | ReasoningDelta | None = None  # white space that may precede a tag
        self._trim = thinking and not begun  # white space at the start of the following text is dropped
        self._before: list[TextDelta] = []  # white space before calls, which belongs to the text if more follows
        self._said = self._called = False
        self._code = Code() if tools else None

    def run(self, cursor: Cursor) -> Reading[None]:
        """Read the whole answer."""
        yield from self._opening(cursor)
        while mark := (yield from self._text(cursor)):
            if self._think and mark in self._think:
                cursor.take(len(mark))
                yield from self._tag(cursor, mark == self._think[0])
            elif mark in self._around:
                cursor.take(len(mark))
                self._trim = not self._said
                self._held = self._held if self._said else None
            elif self.thinking or self._code or mark in self._bare:
                cursor.mark()
                yield from self._sketch(cursor, cursor.offset, mark)
            else:
                yield from self._attempt(cursor, self._readers[mark])
        if self._held and not self._called and not self.thinking:
            yield self._held

    def _opening(self, cursor: Cursor) -> Reading[None]:
        """Read the start. Reasoning, or a call without its tag, can only begin an answer."""
        begins = [self._think[0], *self._stray] if self._think and not self._begun else []
        if not begins and (self.thinking or not self._begins):
            return
        start = cursor.offset
        space = yield from spaces(cursor)
        mark = yield from skip(cursor, *begins)
        if self._think and mark in self._think:
            self._turn(True)
            yield from self._tag(cursor, mark == self._think[0])
            return
        self._held = TextDelta(space, start=start) if space else None
        if not self.thinking:
            yield from self._begin(cursor)

    def _begin(self, cursor: Cursor) -> Reading[None]:
        """Read the beginning of a text, which may be a call without its tag, or in a fence."""
        mark = yield from starts_with(cursor, self._begins)
        if mark == FENCE:
            yield from self._fenced(cursor)
        elif mark:
            yield from self._attempt(cursor, self._firsts[mark])

    def _fenced(self, cursor: Cursor) -> Reading[None]:
        """Read a fence that may have a call and be the whole answer, or nothing."""
        cursor.mark()
        start = cursor.offset
        try:
            yield from fence(cursor)
            mark = yield from starts_with(cursor, [*self._firsts])
        except MalformedError:
            mark = ""
        if mark:
            yield from self._sketch(cursor, start, mark, alone=True)
        else:
            cursor.rewind(0)

    def _tag(self, cursor: Cursor, opens: bool) -> Reading[None]:
        """Begin or end reasoning. A tag that does neither is left out."""
        if opens == self.thinking:
            return
        self._turn(opens)
        if not opens and self._begins and not self._said:
            yield from spaces(cursor)
            yield from self._begin(cursor)

    def _turn(self, thinking: bool) -> None:
        self.thinking = thinking
        self._trim = thinking or not self._said
        self._held = None

    def _text(self, cursor: Cursor) -> Reading[str]:
        """Yield everything up to a tag, which is not read; "" means the end."""
        while True:
            at, mark = find_first(cursor.buffer, self._marks[self.thinking])
            yield from self._say(cursor.offset, cursor.take(at))
            if cursor.ended and not mark:
                yield from self._say(cursor.offset, cursor.take(len(cursor.buffer) - self._half(cursor)))
            if mark or cursor.ended:
                return mark
            yield None

    def _half(self, cursor: Cursor) -> int:
        """Return how much of a tag ends an answer that was cut off. In text one character may be anything: a < b."""
        tags = [mark for mark in self._marks[self.thinking] if mark[0] in "<[" and mark not in self._bare]
        half = 0 if cursor.complete or (self._code and not self.thinking) else overlap(cursor.buffer, tags)
        return half * (half > 1 or self.thinking)

    def _say(self, start: int, text: str) -> Reading[None]:
        """Yield text without the white space at its ends. White space at its end waits for more text."""
        if self._code is not None and not self.thinking:
            self._code.read(text)
        if self._trim:
            start, text = start + len(text) - len(text.lstrip()), text.lstrip()
        if not text:
            return
        self._trim = False
        if self._held:
            start, text = self._held.start, self._held.text + text
        if text.strip() and not self.thinking:
            yield from self._before
            self._before = []
        core = text.rstrip() if self._readers or self._stray or self.thinking else text
        self._held = self._delta(text[len(core) :], start + len(core)) if len(core) < len(text) else None
        if core:
            self._said = self._said or not self.thinking
            yield self._delta(core, start)

    def _delta(self, text: str, start: int) -> TextDelta | ReasoningDelta:
        return ReasoningDelta(text, start=start) if self.thinking else TextDelta(text, start=start)

    def _attempt(self, cursor: Cursor, reader: CallReader) -> Reading[None]:
        """Read one or more calls, or the same characters as text."""
        cursor.mark()
        start, keep, opened = cursor.offset, 1, False  # another mark may begin within this one
        try:
            for delta in reader(cursor, self._tools):
                if isinstance(delta, CallStart):
                    opened = True
                    self._put_aside()
                yield delta
                if isinstance(delta, CallEnd):
                    self._called, self._trim = True, not self._said
                    cursor.mark()
                    start, keep, opened = cursor.offset, 0, False
        except MalformedError:
            if opened:
                yield CallBroken()
            else:
                self._retry(cursor, keep)
            yield from self._say(start, cursor.trail())

    def _put_aside(self) -> None:
        """Keep white space before a call for text behind it."""
        if self._said and isinstance(self._held, TextDelta):
            self._before.append(self._held)
        self._held = None

    def _sketch(self, cursor: Cursor, start: int, mark: str, alone: bool = False) -> Reading[None]:
        """Read calls without tags, or within reasoning or code, behind what has been read from `start`. They are meant
        if only white space, end tags and calls follow: a model goes on after what it has only sketched. They are held
        back until that is known. A fence that stands `alone` may be closed, too.
        """
        opener = len(cursor.trail()) + len(mark)
        inside, made = yield from self._held_back(cursor, mark, (FENCE,) if alone else ())
        if made and cursor.complete and not cursor.buffer:
            self._held, self._called = None, True
            for call in made:
                yield from call
            return
        if inside:
            cursor.rewind(inside)
        else:
            self._retry(cursor, opener)
        yield from self._say(start, cursor.trail())

    def _held_back(self, cursor: Cursor, mark: str, closing: tuple[str, ...]) -> Reading[tuple[int, list[Call]]]:
        """Read calls up to the first thing that is none, without yielding them.

        Returns how many characters of them stand within the reasoning or the code, and the calls; none before a broken
        one, or where others stand behind the reasoning, or have tags behind those without.
        """
        inside, thinks, made = 0, self.thinking, list[Call]()
        kind = self._bare if mark in self._bare else (*self._firsts,)
        while mark in kind and thinks == self.thinking:
            try:
                made += yield from self._whole_calls(cursor, mark)
            except MalformedError:
                return inside, []
            yield from spaces(cursor)
            inside = len(cursor.trail())
            while end := (yield from skip(cursor, END_CALL, *closing, *(self._closing if self.thinking else ()))):
                thinks = thinks and end == END_CALL
                yield from spaces(cursor)
            mark = yield from starts_with(cursor, self._marks[thinks])
        return inside, [] if mark in self._readers else made

    def _whole_calls(self, cursor: Cursor, mark: str) -> Reading[list[Call]]:
        calls: list[Call] = []
        for delta in self._firsts[mark](cursor, self._tools):
            if delta is None:
                yield None
            elif isinstance(delta, CallStart):
                if delta.name not in self._tools:  # a model that reasons about calls may quote them
                    raise MalformedError("no such tool")
                calls.append([delta])
            else:
                calls[-1].append(delta)
        return calls

    def _retry(self, cursor: Cursor, keep: int) -> None:
        """Take back the text after the tag: it may contain a call."""
        read = len(cursor.trail())
        if read < keep:
            cursor.take(keep - read)
        elif read <= LONGEST_RETRY:
            cursor.rewind(keep)
