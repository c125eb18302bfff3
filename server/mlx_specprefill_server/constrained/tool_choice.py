"""The tools that a model may or must call, as the request says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..http.errors import refusal
from ..prompt.conversation import Conversation
from ..prompt.deferred import Tool, brings_tools, tool_name


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A choice of the one tool that must be called."""

    name: str


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """A choice among some of the tools: one may be called ("auto") or must be ("required")."""

    names: frozenset[str]
    mode: Literal["auto", "required"]


ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedTools


def read_choice(given: str | dict[str, Any]) -> ToolChoice:
    """Return OpenAI's `tool_choice`, in the form of chat completions or of responses.

    Raises:
        InvalidRequestError: the value is no tool choice, or names tools that only the provider has.
    """
    match given:
        case "auto" | "none" | "required":
            return given
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return NamedTool(name)
        case {"type": "custom", "custom": {"name": str(name)}} | {"type": "custom", "name": str(name)}:
            return NamedTool(name)
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)} | {"type": "allowed_tools", **allowed}:
            return _allowed_tools(allowed)
    rule = '"none", "auto", "required", {"type": "function", "function": {"name": …}} or allowed_tools'
    raise refusal("tool_choice", f"must be {rule}")


def _allowed_tools(given: Mapping[Any, Any]) -> AllowedTools:
    """Read OpenAI's object with `mode` and `tools`. Tools other than functions are the provider's own and left out."""
    mode, tools = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise refusal("tool_choice", "allowed_tools needs mode ('auto' or 'required') and tools (an array)")
    functions = [
        tool for tool in tools if isinstance(tool, dict) and tool.get("type", "function") in ("function", "custom")
    ]
    return AllowedTools(frozenset(map(_given_name, functions)), mode)


def _given_name(tool: Mapping[str, Any]) -> str:
    """Return the name in the form of chat completions or of responses."""
    match tool:
        case {"function": {"name": str(name)}} | {"custom": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise refusal("tool_choice", "each of the allowed tools needs a name")


def resolve_tool_choice(conversation: Conversation, choice: ToolChoice) -> tuple[Conversation, ToolChoice]:
    """Return the conversation with the tools that the model sees, and the remaining choice among them.

    A deferred tool that must be called stands in front at once, and so do those whose search is not allowed.

    Raises:
        InvalidRequestError: an allowed tool does not exist.
    """
    match choice:
        case "none":
            return replace(conversation, tools=(), loaded=(), waiting=()), choice
        case AllowedTools():
            parts = (conversation.tools, conversation.loaded, conversation.waiting)
            missing = choice.names - {tool_name(tool) for part in parts for tool in part}
            if missing:
                raise refusal("tool_choice", f"no tool is called {min(missing)!r}")
            front, loaded, waiting = (tuple(t for t in part if tool_name(t) in choice.names) for part in parts)
            if not any(map(brings_tools, front)):
                front, waiting = (*front, *waiting), ()
            return replace(conversation, tools=front, loaded=loaded, waiting=waiting), choice.mode
        case NamedTool():
            named = tuple(tool for tool in conversation.waiting if tool_name(tool) == choice.name)
            rest = tuple(tool for tool in conversation.waiting if tool_name(tool) != choice.name)
            return replace(conversation, tools=(*conversation.tools, *named), waiting=rest), choice
    return conversation, choice


def forced_tools(tools: Sequence[Tool], choice: ToolChoice) -> Sequence[Tool]:
    """Return the tools of which one must be called, none if a call is optional.

    Raises:
        InvalidRequestError: there is no such tool.
    """
    if choice in ("auto", "none"):
        return ()
    chosen = [tool for tool in tools if not isinstance(choice, NamedTool) or tool_name(tool) == choice.name]
    if not chosen:
        missing = f"no tool is called {choice.name!r}" if isinstance(choice, NamedTool) else "needs tools"
        raise refusal("tool_choice", missing)
    return chosen
