"""Edits of what an agent has sent already: a tool whose server answered late, new lines in an early result."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .agent_sessions import Count, Message, result
from .agent_tools import mcp_tools

TOKENS = 200  # of one edit, about


@dataclass(frozen=True)
class Edit:
    """One insertion.

    Attributes:
        tool: stands behind the first tool from now on; None: the lines are inserted instead.
        lines: stand in the middle of the first result of a tool.
    """

    tool: dict[str, Any] | None
    lines: str = ""

    def apply(
        self, history: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """Return the messages and the tools after it."""
        if self.tool is not None:
            return [*history], [*tools[:1], self.tool, *tools[1:]]
        first = next((at for at, message in enumerate(history) if message["role"] == "tool"), len(history))
        return [_longer(message, self.lines) if at == first else message for at, message in enumerate(history)], [
            *tools
        ]


def _longer(message: Message, lines: str) -> Message:
    said = message["content"].split("\n")
    middle = len(said) // 2
    return {**message, "content": "\n".join([*said[:middle], lines, *said[middle:]])}


def make_edits(number: int, seed: str, count: Count) -> list[Edit]:
    """Return so many edits: tools and lines in turn.

    Args:
        count: tokens of a text.
    """
    rng = random.Random(f"edits/{seed}")
    late = [{"type": "function", "function": tool} for tool in mcp_tools(number, TOKENS, f"late/{seed}", count)]
    return [Edit(late[at]) if at % 2 == 0 else Edit(None, result("read", rng, TOKENS, count)) for at in range(number)]
