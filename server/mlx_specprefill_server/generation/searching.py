"""Answers that go on behind a search for tools: the server searches, shows what it found, and the model continues."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson

from mlx_specprefill import SpecPrefillError, TokenIds

from ..deltas import AnswerDelta, AnswerDone, CallBroken, CallEnd, CallStart, ReasoningDelta, TextDelta, ToolsFound
from ..prompt.conversation import Conversation, Message, search_message
from ..prompt.deferred import Reference
from ..tool_search import SearchError, search
from .generation import Generation

MOST_SEARCHES = 8  # in one answer; then it ends

Start = Callable[[Conversation, int], Awaitable[Generation]]  # the conversation, and the tokens of the answer so far


class SearchingGeneration:
    """One answer, made of several: each but the last ends with a search. Attributes as in Generation.

    Args:
        first: the answer to `conversation`.
        start: starts the answer to the conversation behind a search.
    """

    copies = 1

    def __init__(self, first: Generation, conversation: Conversation, start: Start) -> None:
        self._inner = first
        self._conversation = conversation
        self._start = start
        self._closed = False
        self._searches = self._tokens = self._reasoning_tokens = 0
        self.warnings: Sequence[str] = first.warnings

    @property
    def deferred(self) -> tuple[int, int]:
        return self._inner.deferred

    @property
    def prompts(self) -> Sequence[TokenIds]:
        return self._inner.prompts

    def take_ids(self, index: int) -> list[int]:
        return self._inner.take_ids(index)

    def close(self) -> None:
        self._closed = True
        self._inner.close()

    async def stream(self) -> AsyncIterator[tuple[int, AnswerDelta]]:
        """Yield the deltas of all parts as one answer: the calls of each part are followed by the ToolsFound of its
        searches, so that they are read back as one message.
        """
        end: AnswerDone | None = None
        while end is None:
            part = _Part(self._conversation)
            async for index, delta in self._inner.stream():
                if isinstance(delta, AnswerDone):
                    end = delta
                    continue
                part.add(delta)
                yield index, delta
            for found in part.found:
                yield 0, found
            assert end is not None  # every stream has one
            end = self._counted(end)
            if part.goes_on and end.error is None and end.finish_reason == "tool_calls":
                end = await self._go_on(part, end)
        yield 0, end

    def _counted(self, end: AnswerDone) -> AnswerDone:
        self._tokens += end.completion_tokens
        self._reasoning_tokens += end.reasoning_tokens
        return replace(end, completion_tokens=self._tokens, reasoning_tokens=self._reasoning_tokens)

    async def _go_on(self, part: _Part, end: AnswerDone) -> AnswerDone | None:
        """Start the answer behind a search. Return its end where it can't go on."""
        self._searches += 1
        if self._searches > MOST_SEARCHES or self._closed:
            return replace(end, finish_reason="stop")
        self._conversation = part.continued()
        try:
            self._inner = await self._start(self._conversation, self._tokens)
        except SpecPrefillError as error:
            return replace(end, finish_reason="length", error=error)
        if self._closed:
            self._inner.close()
        return None


class _Part:
    """The model's words up to its next end, with the results of its searches.

    Attributes:
        found: the results of its searches.
        goes_on: all calls are searches that were answered.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._given = conversation
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._results: list[Message] = []
        self.found: list[ToolsFound] = []
        self._open: CallStart | None = None

    @property
    def goes_on(self) -> bool:
        return bool(self._calls) and len(self._calls) == len(self._results)

    def add(self, delta: AnswerDelta) -> None:
        """Take a delta. Make the search that it completes."""
        match delta:
            case TextDelta():
                self._texts.append(delta.text)
            case ReasoningDelta():
                self._thoughts.append(delta.text)
            case CallStart():
                self._open = delta
            case CallBroken():
                self._open = None
            case CallEnd() if self._open is not None:
                self._called(self._open, orjson.loads(delta.arguments))

    def _called(self, call: CallStart, arguments: dict[str, Any]) -> None:
        function = {"name": call.name, "arguments": arguments}
        self._calls.append({"id": call.id, "type": "function", "function": function})
        if call.name not in self._given.searches:
            return
        found = self._search(call, arguments)
        loads = [Reference(name, call.name) for name in found.names]
        self._results.append(search_message(call.id, found.error, loads) | {"name": call.name})
        self.found.append(found)

    def _search(self, call: CallStart, arguments: dict[str, Any]) -> ToolsFound:
        tools = (*self._given.loaded, *self._given.waiting)
        try:
            return ToolsFound(call.id, tuple(search(self._given.searches[call.name], arguments, tools)))
        except SearchError as error:
            return ToolsFound(call.id, (), str(error))

    def continued(self) -> Conversation:
        """Return the conversation with what was said and found."""
        said: Message = {"role": "assistant", "content": "".join(self._texts), "tool_calls": self._calls}
        if self._thoughts:
            said["reasoning_content"] = said["reasoning"] = "".join(self._thoughts)
        return self._given.extended((said, *self._results))
