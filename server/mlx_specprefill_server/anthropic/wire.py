"""Anthropic's content blocks and events of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from ..deltas import (
    AnswerDelta,
    AnswerDone,
    CallBroken,
    CallDelta,
    CallEnd,
    CallStart,
    ReasoningDelta,
    TextDelta,
)

__all__ = ["BlockWriter", "stop_of"]

Event = dict[str, Any]

# A signature proves who wrote the thinking. Clients send it back unread. Some drop a thinking block without one.
SIGNATURE = "mlx-specprefill"
START: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def stop_of(end: AnswerDone, torn: bool = False) -> dict[str, Any]:
    """Return the reason for the end. `torn` means that part of a call was sent: clients expect that of cut-off answers
    only.
    """
    if torn:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if end.finish_reason == "stop" and end.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_string}
    return {"stop_reason": STOP_REASONS[end.finish_reason], "stop_sequence": None}


class BlockWriter:
    """A writer of one answer. At most one block is open at a time: text, thinking or a tool call."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []  # closed blocks, in the form of a whole message
        self._index = 0  # the index of the open block, or of the next one
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []  # the text of the open block
        self.broken = False  # a call was announced and turned out malformed

    def write(self, delta: AnswerDelta) -> Iterator[Event]:
        """Return the events of one delta."""
        match delta:
            case TextDelta() if delta.text:
                yield from self._ensure("text")
                yield self._delta(delta.text)
            case ReasoningDelta() if delta.text:
                yield from self._ensure("thinking")
                yield self._delta(delta.text)
            case CallStart():
                yield from self.close()
                yield self._start({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
            case CallDelta():
                yield self._delta(delta.text)
            case CallEnd():
                yield from self.close()
            case CallBroken():
                yield from self.close()
                self.blocks.pop()
                self.broken = True

    def stir(self, thinks: bool) -> Iterator[Event]:
        """Return an empty delta, in a new block if none is open. Clients count it as content."""
        if self._open is None:
            yield self._start(START["thinking" if thinks else "text"])
        yield self._delta("")

    def close(self) -> Iterator[Event]:
        """Return the event that ends the open block, if there is one."""
        if self._open is None:
            return
        block, text = self._open, "".join(self._text)
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            yield self._changed({"type": "signature_delta", "signature": SIGNATURE})
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        yield {"type": "content_block_stop", "index": self._index}
        self.blocks.append(block)
        self._index += 1
        self._open, self._text = None, []

    def _ensure(self, kind: str) -> Iterator[Event]:
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self.close()
        yield self._start(START[kind])

    def _start(self, block: dict[str, Any]) -> Event:
        self._open = dict(block)
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, text: str) -> Event:
        assert self._open is not None
        self._text.append(text)
        kind, name = DELTAS[self._open["type"]]
        return self._changed({"type": kind, name: text})

    def _changed(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _arguments(text: str) -> dict[str, Any]:
    """Return whole arguments as an object. Arguments of a call that was cut off are no JSON and can't be passed on."""
    try:
        arguments = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
