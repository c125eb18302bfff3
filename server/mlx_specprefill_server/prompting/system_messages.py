"""System messages in the middle of a conversation stay where they are.

Templates want their only system message in front, but moving a later one there would change the prompt from its
beginning on, and nothing of it could come from the cache. Agents add such messages when something changes (a mode, the
set of tools). They go into the user message beside them, in the tag that Claude Code itself uses for this.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from .conversation import Message

__all__ = ["inline_system_messages"]


def inline_system_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with system and developer messages at the beginning only. Contents must be texts."""
    out: list[Message] = []
    reminder: str | None = None  # reminders of the group before, if it could not join a user message
    for is_system, group in groupby(messages, key=lambda message: message["role"] in ("system", "developer")):
        run = list(group)
        if not is_system or not out:
            out += _add_reminder(reminder, run)
            reminder = None
        elif out[-1]["role"] == "user":
            out += _add_reminder(_reminder(run), [out.pop()])
        else:
            reminder = _reminder(run)
    return out + _add_reminder(reminder, [])


def _reminder(system: Sequence[Message]) -> str:
    text = "\n\n".join(message["content"] for message in system)
    return f"<system-reminder>\n{text}\n</system-reminder>"


def _add_reminder(reminder: str | None, run: list[Message]) -> list[Message]:
    """Put the reminder in front: the user's text stays last, where a sparse prefill keeps it."""
    if reminder is None:
        return run
    if run and run[0]["role"] == "user":
        return [run[0] | {"content": f"{reminder}\n\n{run[0]['content']}"}, *run[1:]]
    return [{"role": "user", "content": reminder}, *run]
