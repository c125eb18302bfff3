"""Answers of models whose tokenizer says how they are read: a `response_template`, which transformers follows.

Its regions are the members of a message. Text and reasoning are passed on as they come, calls when they are complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..deltas import ContentDelta, ReasoningDelta, TextDelta
from ..parsers.base import Cursor, MalformedError, Reading, Tools
from ..parsers.call_parts import whole_call
from ..parsers.native_calls import FAULTS, check_native_call

CALLS = "tool_calls"
REASONING = ("thinking", "reasoning", "reasoning_content")


class TemplateText:
    """A divider of an answer into deltas by transformers' parser.

    Args:
        reader: it, at the end of the prompt.
    """

    def __init__(self, tools: Tools, reader: Any) -> None:
        self.thinking = False
        self._tools = tools
        self._reader = reader
        self._read = ""  # of the answer
        self._at = self._fed = 0  # how much of it is passed on or belongs to marks, and how much the reader has
        self._failed = False
        self._follow(self._reader.initial_events)

    def run(self, cursor: Cursor) -> Reading[None]:
        """Read the whole answer, sign by sign: what comes of a text does not depend on where it was cut."""
        while not cursor.ended or cursor.buffer:
            new = cursor.take(len(cursor.buffer))
            self._read += new
            yield from _joined(delta for sign in new for delta in self._deltas(self._reader.feed, sign))
            if not cursor.ended:
                yield None
        yield from self._deltas(lambda: self._reader.finalize()[1])

    def _deltas(self, read: Any, *text: str) -> Iterator[ContentDelta]:
        """Yield what comes of a step. Where the template can't be followed, the rest of the answer is text."""
        if self._failed:
            yield from self._rest("".join(text))
            return
        try:
            events = list(read(*text))
        except FAULTS:  # of a call that is none
            self._failed = True
            yield from self._rest(self._read[self._at : self._fed + len("".join(text))])
        else:
            for event in events:
                yield from self._delta(event)
            self._follow(events)
        self._fed += len("".join(text))

    def _rest(self, text: str) -> Iterator[ContentDelta]:
        if text:
            yield TextDelta(text, start=self._at)
            self._at += len(text)

    def _delta(self, event: Mapping[str, Any]) -> Iterator[ContentDelta]:
        if event["field"] == CALLS and self._tools:
            yield from self._calls(event)
        elif event["type"] == "region_chunk":
            kind = ReasoningDelta if event["field"] in REASONING else TextDelta
            yield kind(event["text"], start=self._place(event["text"]))

    def _calls(self, event: Mapping[str, Any]) -> Iterator[ContentDelta]:
        """Yield the calls of a region at its end, or its text with its marks."""
        if event["type"] != "region_close":
            return
        value = event["value"]
        try:
            calls = [self._call(call) for call in (value if isinstance(value, list) else [value])]
        except (MalformedError, *FAULTS):
            yield from self._rest(self._read[self._at : self._fed + 1])
            return
        for name, arguments in calls:
            yield from filter(None, whole_call(name, arguments))
        self._at = self._fed + 1

    def _call(self, call: Any) -> tuple[str, dict[str, Any]]:
        return check_native_call(call.get("function", call), self._tools)

    def _place(self, text: str) -> int:
        """Return the place of text that has come, behind what was passed on before."""
        start = max(self._read.find(text, self._at), self._at)
        self._at = start + len(text)
        return start

    def _follow(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            self.thinking = event["field"] in REASONING and event["type"] != "region_close"


def _joined(deltas: Iterable[ContentDelta]) -> Iterator[ContentDelta]:
    """Yield deltas with neighbouring texts of one kind as one."""
    held: TextDelta | ReasoningDelta | None = None
    for delta in deltas:
        if held and type(delta) is type(held) and delta.start == held.start + len(held.text):
            held = replace(held, text=held.text + delta.text)
            continue
        if held:
            yield held
        held = delta if isinstance(delta, TextDelta | ReasoningDelta) else None
        if held is None:
            yield delta
    if held:
        yield held
