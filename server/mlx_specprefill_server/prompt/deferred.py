"""Tools that are loaded when needed: the prompt has no schema of theirs until a result of a search names them.

Everything comes from the request: which tools are deferred, and which references its messages hold. So a conversation
that goes on keeps its beginning, also on another server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..http.errors import refusal, require

Tool = Mapping[str, Any]  # in the form of chat completions
Message = dict[str, Any]

FLAG = "defer_loading"
LOADS = "loads"  # a message's member: References, and then the tools whose schemas it shows
SEARCHES = re.compile(r"(?=.*tool)(?=.*(search|find|load))", re.IGNORECASE)  # a function that brings references
HEADER = "These tools can be called from now on:"
AGAIN = "These tools can be called already: {}"
ASIDE = "<system-reminder>\n{}\n</system-reminder>"  # around what is in the user's name and not the user's


class Reference(NamedTuple):
    """A mention of a tool that a message loads; `path` is the place of its name in the request."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Deferral:
    """The tools of a request in three parts, and its messages.

    Attributes:
        front: rendered before the conversation.
        loaded: shown by messages.
        waiting: not in the prompt.
        messages: those with LOADS have the tools that they show in place of References.
    """

    front: tuple[Tool, ...]
    loaded: tuple[Tool, ...]
    waiting: tuple[Tool, ...]
    messages: tuple[Message, ...]


def tool_name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def deferral_of(tool: Mapping[str, Any], where: str) -> dict[str, bool]:
    """Return the flag of a tool of any dialect that asks to be loaded later, nothing of others.

    Raises:
        InvalidRequestError: the flag is neither true nor false.
    """
    value = tool.get(FLAG)
    require(value is None or isinstance(value, bool), f"{where}.{FLAG}", "must be true or false")
    return {FLAG: True} if value else {}


def is_deferred(tool: Tool) -> bool:
    return FLAG in tool


def without_flag(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool without the flag, which means nothing to a model."""
    return {name: value for name, value in tool.items() if name != FLAG}


def divide(tools: Sequence[Tool], messages: Sequence[Message], any_tool: bool) -> Deferral:
    """Return which tools stand in front of the conversation, which are shown in it, and which are not.

    Without anything that could load them, deferred tools stand in front like the others: no tool is lost.

    Args:
        tools: those that are deferred have the flag.
        any_tool: any tool may bring references; otherwise only one whose name says so.

    Raises:
        InvalidRequestError: a reference names no tool; the message says which.
    """
    refers = any(LOADS in message for message in messages)
    brings = any_tool and not all(map(is_deferred, tools))
    defers = refers or brings or any(brings_tools(tool) for tool in tools if not is_deferred(tool))
    later = {tool_name(tool): defers and is_deferred(tool) for tool in reversed(tools)}
    front = _plain([tool for tool in tools if not later[tool_name(tool)]])
    rest = _plain([tool for tool in tools if later[tool_name(tool)]])
    seen: dict[str, Tool] = {}
    known = {tool_name(tool): tool for tool in reversed((*front, *rest))}
    names = {tool_name(tool) for tool in front}
    out = tuple(_resolved(message, known, names, seen) if LOADS in message else message for message in messages)
    return Deferral(front, tuple(seen.values()), tuple(tool for tool in rest if tool_name(tool) not in seen), out)


def brings_tools(tool: Tool) -> bool:
    """Return whether a tool's name says that it finds others."""
    return SEARCHES.match(tool_name(tool)) is not None


def _plain(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    return tuple(without_flag(tool) if is_deferred(tool) else tool for tool in tools)


def _resolved(message: Message, known: Mapping[str, Tool], front: set[str], loaded: dict[str, Tool]) -> Message:
    """Return the message with the tools that it is the first to show, and a sentence about others that it names."""
    shown, again = list[Tool](), list[str]()
    for reference in {reference.name: reference for reference in message[LOADS]}.values():
        if reference.name not in known:
            raise refusal(reference.path, f"no tool of this request is called {reference.name!r:.80}")
        if reference.name in front or reference.name in loaded:
            again.append(reference.name)
        else:
            loaded[reference.name] = known[reference.name]
            shown.append(known[reference.name])
    form = ASIDE.format(AGAIN) if message["role"] == "user" else AGAIN
    content = "\n".join(filter(None, (message["content"], form.format(", ".join(again)) if again else "")))
    rest = {name: value for name, value in message.items() if name != LOADS}
    return rest | {"content": content} | ({LOADS: tuple(shown)} if shown else {})


def with_schemas(message: Message, write: Callable[[Tool], str]) -> Message:
    """Return the message with the schemas of the tools that it loads behind its text."""
    texts = (message["content"], HEADER, *map(write, message[LOADS]))
    return message | {"content": "\n".join(filter(None, texts)), LOADS: True}
