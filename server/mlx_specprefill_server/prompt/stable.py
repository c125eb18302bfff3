"""Prompts that stay as they were: without lines that change every time, with tools in their first order.

One changed token makes everything behind it be read again.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from mlx_specprefill import CacheLabel

from ..big_json import dumps
from .conversation import Conversation

_MOST = 256  # sets of tools

# Lines of system messages that say nothing to a model, by agent, as recorded from it.
VOLATILE_LINES: Mapping[str, re.Pattern[str]] = {
    "Claude Code's billing header": re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE),  # 2.1.330
}


def remove_volatile_lines(conversation: Conversation) -> tuple[Conversation, tuple[str, ...]]:
    """Remove such lines from the system message, which is the first; return the conversation, and a sentence for each
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


class ToolOrders:
    """The order in which each set of tools was first sent under a label. Used on the event loop."""

    def __init__(self) -> None:
        self._orders: OrderedDict[Any, tuple[bytes, ...]] = OrderedDict()  # by label and digests, least recent first

    def sort(self, tools: Sequence[Mapping[str, Any]], label: CacheLabel) -> tuple[Mapping[str, Any], ...]:
        """Sort tools as in an earlier request with the same ones. Their order means nothing to a model."""
        named = {blake2b(dumps(tool), digest_size=16).digest(): tool for tool in tools}
        if len(named) < len(tools):
            return tuple(tools)
        key = label, frozenset(named)
        order = self._orders.setdefault(key, tuple(named))
        self._orders.move_to_end(key)
        if len(self._orders) > _MOST:
            self._orders.popitem(last=False)
        return tuple(named[digest] for digest in order)

    def forget(self, owner: str | None) -> None:
        """Drop the orders of one owner's labels, or all."""
        for key in [key for key in self._orders if owner in (None, key[0].owner)]:
            del self._orders[key]
