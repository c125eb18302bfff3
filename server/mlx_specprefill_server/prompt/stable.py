"""Keeps the beginning of prompts the same: without lines that change every time, with tools in their first order.

Everything behind a changed token is read again.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from mlx_specprefill import CacheLabel

from ..big_json import dumps
from ..http.body_room import BodyPlace, BodyRoom
from ..http.errors import ApiError
from .conversation import Conversation
from .deferred import Tool

Count = Callable[[Sequence[Tool]], Awaitable[int]]
Key = tuple[CacheLabel, bytes]

LIMIT = 1 << 20  # bytes that are remembered of one model's tools
_DIGEST = 16  # bytes
_ENTRY = 1 << 10  # bytes that an entry takes besides its digests

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


class ToolMemory:
    """A memory of tools under a label: the order in which each set was first sent, and how many tokens the
    deferred ones of a request have. It holds digests only. Used on the event loop.

    Args:
        room: in which it counts, beside the bodies of requests. Where there is none, nothing more is remembered.
    """

    def __init__(self, room: BodyRoom) -> None:
        self._place = BodyPlace(room)
        self._times = 0  # that something was forgotten
        self._kept: OrderedDict[Key, tuple[Any, int]] = OrderedDict()  # with sizes in bytes, least recent first

    def sort(self, tools: Sequence[Tool], label: CacheLabel) -> tuple[Tool, ...]:
        """Sort tools as in an earlier request with the same ones. Their order means nothing to a model."""
        named = {_digest(dumps(tool)): tool for tool in tools}
        if len(named) < len(tools):
            return tuple(tools)
        key = label, _digest(b"".join(sorted(named)))
        if (order := self._recall(key)) is None:
            self._keep(key, order := b"".join(named), len(order))
        return tuple(named[order[i : i + _DIGEST]] for i in range(0, len(order), _DIGEST))

    async def tokens(self, tools: Sequence[Tool], label: CacheLabel, count: Count) -> int:
        """Return the tokens of deferred tools, which `count` counts where that is not remembered."""
        key = label, _digest(dumps(list(tools)))
        if (tokens := self._recall(key)) is None:
            before = self._times
            tokens = await count(tools)
            if self._times == before:
                self._keep(key, tokens, 0)
        return int(tokens)

    def forget(self, owner: str | None) -> None:
        """Drop what is under one owner's labels, or all. What is being counted is not kept."""
        self._times += 1
        for key in [key for key in self._kept if owner in (None, key[0].owner)]:
            self._drop(key)

    def _recall(self, key: Key) -> Any:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def _keep(self, key: Key, value: Any, size: int) -> None:
        size += _ENTRY
        if key in self._kept or size > LIMIT:
            return
        while self._place.own + size > LIMIT:
            self._drop(next(iter(self._kept)))
        with suppress(ApiError):
            self._place.take(size)
            self._kept[key] = value, size

    def _drop(self, key: Key) -> None:
        self._place.take(-self._kept.pop(key)[1])


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=_DIGEST).digest()
