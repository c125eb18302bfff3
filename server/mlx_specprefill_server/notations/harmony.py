"""GPT-OSS's messages: each has a header with role, recipient and channel, then its text.

`<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`; the prompt ends
inside the first header. The analysis channel is reasoning, the final one and commentary to nobody are text, messages to
a function are calls. What is written to another tool is for nobody here: it is reasoning, too. Source: OpenAI's
"harmony response format".
"""

from __future__ import annotations

import re

from ..deltas import CallBroken, CallEnd, CallStart, ContentDelta, ReasoningDelta, TextDelta
from ..parsers.base import Cursor, MalformedError, Reading, Tools, find_first, skip, spaces, starts_with
from ..parsers.call_parts import call, emit, until
from ..parsers.json_text import JsonReader
from .declaration import Notation, Written

HEADER = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")  # before a header, in it, and behind it
START, CHANNEL, CONSTRAIN, MESSAGE = HEADER
ENDS = ("<|end|>", "<|call|>", "<|return|>")
ANSWER_ENDS = ENDS[1:]  # after a call it is the tool's turn
BREAKS = (*ENDS, START, CHANNEL)  # a header ends a text, too
REASONING_HEAD, REASONING_END, ANSWER_HEAD = f"{CHANNEL}analysis", ENDS[0], f"{START}assistant"
HEADS = (*HEADER, "to=")
LONGEST_HEADER = 512
RECIPIENT = re.compile(r"to=([^\s<]+)")
PREFIX = "functions."
OPENED = re.compile(r"(<\|start\|>assistant)?<\|channel\|>\s*(analysis|commentary|final)\s+(?!to=)")
REASONING = re.compile(r"<\|channel\|>\s*analysis\b")
STRANGER = re.compile(r"to=(?!functions\.|user\b|assistant\b)")  # a tool of OpenAI's own, such as python


def opened_header(prompt: str) -> str:
    """Return the part of the answer's first message that the prompt already contains."""
    return prompt.rpartition(START)[2]


class HarmonyText:
    """A divider of harmony's text into deltas.

    Args:
        header: see `opened_header`.
    """

    def __init__(self, tools: Tools, header: str = "") -> None:
        self.thinking = False
        self._tools = tools
        self._header = header

    def run(self, cursor: Cursor) -> Reading[None]:
        """Read all messages."""
        header = ""
        if MESSAGE in self._header:
            header, self._header = self._header, ""
        while True:
            cursor.mark()
            start = cursor.offset
            header = header or (yield from self._read_header(cursor))
            recipient, reasoning = self._recipient(header), bool(REASONING.search(header))
            if recipient and self._tools:
                yield from (self._sketch if reasoning else self._call)(cursor, start, recipient)
            elif recipient or (header and MESSAGE not in header):
                yield self._headless(cursor.trail(), start, reasoning)
            yield from self._body(cursor, not recipient and (reasoning or bool(STRANGER.search(header))))
            if cursor.ended and not cursor.buffer:
                return
            header = ""

    def _recipient(self, header: str) -> str:
        """Return the function that a message is for, "" for none. Models omit the prefix of functions."""
        found = RECIPIENT.search(header)
        if found is None or found[1] in self._tools:
            return found[1] if found else ""
        return found[1].removeprefix(PREFIX) if found[1].startswith(PREFIX) else ""

    def _headless(self, text: str, start: int, reasoning: bool) -> ContentDelta:
        """Return a text whose header does not end, without what is certainly the header."""
        found = OPENED.match(text)
        at = found.end() if found else 0
        return (ReasoningDelta if reasoning and found else TextDelta)(text[at:], start=start + at)

    def _read_header(self, cursor: Cursor) -> Reading[str]:
        """Read a header including the message mark. It is empty for text without a header."""
        before, self._header = self._header, ""
        yield from spaces(cursor)
        if not (yield from starts_with(cursor, HEADS)):
            cursor.rewind(0)
            return ""
        while True:
            at, mark = find_first(cursor.buffer, (MESSAGE, *ENDS))
            if mark:
                return before + cursor.take(at + len(MESSAGE) * (mark == MESSAGE))
            if cursor.ended or len(cursor.buffer) > LONGEST_HEADER:
                return before + cursor.take(LONGEST_HEADER)
            yield None

    def _body(self, cursor: Cursor, reasoning: bool) -> Reading[None]:
        """Yield a message's text up to its end."""
        self.thinking = reasoning
        while True:
            at, mark = find_first(cursor.buffer, BREAKS)
            if cursor.ended and not mark:
                at = len(cursor.buffer)
            if at:
                kind = ReasoningDelta if reasoning else TextDelta
                yield kind(cursor.take(at), start=cursor.offset - at)
            if mark in ENDS:
                cursor.take(len(mark))
            if mark or cursor.ended:
                break
            yield None
        self.thinking = False

    def _sketch(self, cursor: Cursor, start: int, name: str) -> Reading[None]:
        """Read a call in the channel of reasoning. It is meant if nothing but calls follows, and else reasoning."""
        made: list[ContentDelta] = []
        try:
            yield from spaces(cursor)
            for delta in call(self._tools.name(name), JsonReader(cursor, ENDS).object()):
                if delta is None:
                    yield None
                else:
                    made.append(delta)
        except MalformedError:
            made = []
        read = len(cursor.trail())
        is_meant = bool(made) and (yield from self._only_calls_follow(cursor))
        cursor.rewind(read)
        yield from made if is_meant else [ReasoningDelta(cursor.trail(), start=start)]

    def _only_calls_follow(self, cursor: Cursor) -> Reading[bool]:
        """Return whether the next message is a call, or nothing follows. What has been looked at is read."""
        yield from spaces(cursor)
        yield from skip(cursor, *ENDS)
        yield from spaces(cursor)
        while not cursor.ended and MESSAGE not in cursor.buffer and len(cursor.buffer) <= LONGEST_HEADER:
            yield None
        follows = self._recipient(cursor.buffer.partition(MESSAGE)[0])
        return bool(follows) or (cursor.complete and not cursor.buffer)

    def _arguments(self, cursor: Cursor) -> Reading[None]:
        """Read an object, or nothing for none."""
        if (yield from skip(cursor, CONSTRAIN)):  # behind the header
            yield from until(cursor, "{")
        if (yield from starts_with(cursor, ENDS)):
            yield from emit("{}")
        else:
            yield from JsonReader(cursor, ENDS).object()

    def _call(self, cursor: Cursor, start: int, name: str) -> Reading[None]:
        """Read one call, or its message as text."""
        opened = False
        try:
            yield from spaces(cursor)
            for delta in call(self._tools.name(name), self._arguments(cursor)):
                opened = opened or isinstance(delta, CallStart)
                yield delta
                opened = opened and not isinstance(delta, CallEnd)
            yield from spaces(cursor)
        except MalformedError:
            if opened:
                yield CallBroken()
            yield TextDelta(cursor.trail(), start=start)


HARMONY = Notation(
    marks=((CHANNEL, MESSAGE),),
    written=(Written(f"{CHANNEL}commentary to=functions.{{name}} {CONSTRAIN}json{MESSAGE}{{arguments}}", None),),
)
