"""Prompts that stay as they were: without lines that change every time, with tools in their order and reasoning kept.

One changed token makes everything behind it be read again.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import orjson

from mlx_specprefill import CacheLabel

from ..deltas import CallStart, ContentDelta, ReasoningDelta
from .conversation import Conversation, Message

T = TypeVar("T")

_MOST = 256  # entries

# Lines of system messages that say nothing to a model, by agent, as recorded from it.
VOLATILE_LINES: Mapping[str, re.Pattern[str]] = {
    "Claude Code's billing header": re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE),  # 2.1.330
}


def without_volatile_lines(conversation: Conversation) -> tuple[Conversation, tuple[str, ...]]:
    """Return the conversation without such lines in its system message, which is the first, and a sentence for each
    kind of them.
    """
    first = conversation.messages[0]
    text, left_out = first["content"], []
    for name, line in VOLATILE_LINES.items():
        text, count = line.subn("", text)
        left_out += [f"left out of the system message: {name}, which changes from session to session"] * bool(count)
    if not left_out:
        return conversation, ()
    system = ({**first, "content": text},) if text.strip() else ()
    return replace(conversation, messages=(*system, *conversation.messages[1:])), tuple(left_out)


class _Recent(Generic[T]):
    """The last `_MOST` values by key."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def put(self, key: Hashable, value: T) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > _MOST:
            self._values.popitem(last=False)

    def get(self, key: Hashable) -> T | None:
        return self._values.get(key)


class ToolOrders:
    """The order in which each set of tools was first sent under a label. Used on the event loop."""

    def __init__(self) -> None:
        self._orders: _Recent[tuple[bytes, ...]] = _Recent()

    def in_known_order(self, tools: Sequence[Mapping[str, Any]], label: CacheLabel) -> tuple[Mapping[str, Any], ...]:
        """Return the tools in the order of an earlier request with the same ones: it means nothing to a model."""
        named = {blake2b(orjson.dumps(tool), digest_size=16).digest(): tool for tool in tools}
        if len(named) < len(tools):
            return tuple(tools)
        key = label, frozenset(named)
        order = self._orders.get(key) or tuple(named)
        self._orders.put(key, order)
        return tuple(named[digest] for digest in order)


class KeptReasoning:
    """The reasoning that led to each tool call, by the call's id and the label. Used on the event loop."""

    def __init__(self) -> None:
        self._texts: _Recent[str] = _Recent()

    def restore(self, conversation: Conversation, label: CacheLabel) -> Conversation:
        """Return the conversation with the reasoning that the client dropped. The template may still leave it out."""
        return replace(
            conversation, messages=tuple(self._with_text(message, label) for message in conversation.messages)
        )

    def _with_text(self, message: Message, label: CacheLabel) -> Message:
        if "reasoning" in message or not message.get("tool_calls"):
            return message
        text = self._texts.get((label, message["tool_calls"][0].get("id")))
        return message if text is None else message | {"reasoning": text, "reasoning_content": text}

    def recorder(self, label: CacheLabel) -> Callable[[ContentDelta], None]:
        """Return a function that takes the deltas of one answer and keeps its reasoning."""
        reasoning: list[str] = []

        def note(delta: ContentDelta) -> None:
            match delta:
                case ReasoningDelta():
                    reasoning.append(delta.text)
                case CallStart() if reasoning:
                    self._texts.put((label, delta.id), "".join(reasoning))

        return note
