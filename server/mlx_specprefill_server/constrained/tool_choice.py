"""The tools that a model may call, and whether it must call one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlx_specprefill import InvalidRequestError

__all__ = ["AllowedTools", "NamedTool", "Tool", "ToolChoice", "read_choice", "resolve_tool_choice", "tool_name"]

Tool = Mapping[str, Any]  # in the form of chat completions


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


def tool_name(tool: Tool) -> str:
    return str(tool["function"]["name"])


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
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)}:
            return _allowed_tools(allowed)
        case {"type": "allowed_tools", "mode": mode, "tools": tools}:
            return _allowed_tools({"mode": mode, "tools": tools})
    rule = '"none", "auto", "required", {"type": "function", "function": {"name": …}} or allowed_tools'
    raise InvalidRequestError(f"tool_choice: must be {rule}", field="tool_choice")


def _allowed_tools(given: Mapping[str, Any]) -> AllowedTools:
    """Read OpenAI's object with `mode` and `tools`. Tools other than functions are the provider's own and left out.

    Raises:
        InvalidRequestError: the value is no such object.
    """
    mode, tools = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list):
        message = "tool_choice: allowed_tools needs mode ('auto' or 'required') and tools (an array)"
        raise InvalidRequestError(message, field="tool_choice")
    functions = [tool for tool in tools if isinstance(tool, dict) and tool.get("type", "function") == "function"]
    return AllowedTools(frozenset(map(_given_name, functions)), mode)


def _given_name(tool: Mapping[str, Any]) -> str:
    """Return the name in the form of chat completions or of responses."""
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise InvalidRequestError("tool_choice: each of the allowed tools needs a name", field="tool_choice")


def resolve_tool_choice(tools: Sequence[Tool], choice: ToolChoice) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools that the model sees, and the remaining choice among them.

    Raises:
        InvalidRequestError: an allowed tool does not exist.
    """
    match choice:
        case "none":
            return (), choice
        case AllowedTools():
            missing = choice.names - {tool_name(tool) for tool in tools}
            if missing:
                raise InvalidRequestError(f"tool_choice: no tool is called {min(missing)!r}", field="tool_choice")
            return tuple(tool for tool in tools if tool_name(tool) in choice.names), choice.mode
    return tuple(tools), choice
