"""Output items of /v1/responses and their events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from mlx_specprefill import TokenEvent

from ..deltas import AnswerDelta, CallBroken, CallDelta, CallEnd, CallStart, ReasoningDelta, TextDelta

__all__ = ["ItemWriter"]

Event = dict[str, Any]
Scored = Callable[[Sequence[TokenEvent]], list[dict[str, Any]]]  # tokens as the wire's logprobs

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


class ItemWriter:
    """A writer of one answer. At most one item is open at a time: a message, reasoning or a function call."""

    def __init__(self, scored: Scored, namespaces: Mapping[str, str]) -> None:
        self.items: list[dict[str, Any]] = []  # closed items
        self._index = 0  # the index of the open item, or of the next one
        self._scored = scored
        self._namespaces = namespaces
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []  # the text of the open item, and the logprobs of its tokens
        self._logprobs: list[dict[str, Any]] = []

    def write(self, delta: AnswerDelta) -> Iterator[Event]:
        """Return the events of one delta."""
        match delta:
            case TextDelta() if delta.text or self._is_open("message"):  # tokens of tags alone make no message
                yield from self._ensure("message", {"role": "assistant", "content": []})
                yield self._delta(delta.text, self._scored(delta.tokens))
            case ReasoningDelta() if delta.text:
                yield from self._ensure("reasoning", {"summary": [], "content": [], "encrypted_content": None})
                yield self._delta(delta.text)
            case CallStart():
                yield from self.close()
                space = {"namespace": self._namespaces[delta.name]} if delta.name in self._namespaces else {}
                call = {"call_id": delta.id, "name": delta.name, "arguments": "", **space}
                yield from self._start("function_call", call)
            case CallDelta():
                yield self._delta(delta.text)
            case CallEnd():
                yield from self.close()
            case CallBroken():
                yield from self.close("incomplete")
                self.items.pop()

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Return the events that end the open item, if there is one."""
        if self._open is None:
            return
        item, text = self._open, "".join(self._text)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._about(f"{EVENTS[item['type']]}.done", name=item["name"], arguments=text)
        else:
            part = _part(item["type"], text, self._logprobs)
            item["content"] = [part]
            logprobs = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            yield self._about(f"{EVENTS[item['type']]}.done", text=text, **logprobs)
            yield self._about("response.content_part.done", part=part)
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}
        self.items.append(item)
        self._index += 1
        self._open, self._text, self._logprobs = None, [], []

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _ensure(self, kind: str, fields: dict[str, Any]) -> Iterator[Event]:
        if self._is_open(kind):
            return
        yield from self.close()
        yield from self._start(kind, fields)
        yield self._about("response.content_part.added", part=_part(kind, "", []))

    def _start(self, kind: str, fields: dict[str, Any]) -> Iterator[Event]:
        item = {"id": f"{PREFIXES[kind]}_{uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self._open = item
        yield {"type": "response.output_item.added", "output_index": self._index, "item": dict(item)}

    def _delta(self, text: str, logprobs: Sequence[dict[str, Any]] | None = None) -> Event:
        assert self._open is not None
        self._text.append(text)
        name = f"{EVENTS[self._open['type']]}.delta"
        if logprobs is None:
            return self._about(name, delta=text)
        self._logprobs += logprobs
        return self._about(name, delta=text, logprobs=logprobs)

    def _about(self, event: str, /, **fields: Any) -> Event:
        """Return an event about the content of the open item."""
        assert self._open is not None
        part = {} if self._open["type"] == "function_call" else {"content_index": 0}
        return {"type": event, "item_id": self._open["id"], "output_index": self._index, **part, **fields}


def _part(kind: str, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
