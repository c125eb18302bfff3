"""Bodies of the three dialects with every kind of part, block, item and tool, and each with a mistake in one place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

MISSING = "(missing)"  # a member that is left out
VALUES: tuple[Any, ...] = (MISSING, None, True, 0, 1.5, "", "x", [], [1], ["x"], [[]], [{}], {}, {"x": 1})

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
FORMAT = {"type": "grammar", "syntax": "regex", "definition": "a+"}
_WAITING = {"name": "later", "description": "d", "defer_loading": True}
_PARTS = [
    {"type": "text", "text": "t"},
    "bare",
    {"type": "input_text", "text": "t"},
    {"type": "refusal", "refusal": "no"},
    {"type": "image_url", "image_url": {"url": "http://x"}},
    {"type": "file", "file": {"filename": "n", "file_data": "data:text/plain;base64,YQ=="}},
]
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": _PARTS, "name": "n"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
                {"id": "b", "type": "custom", "custom": {"name": "patch", "input": "i"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "t"}, {"type": "image"}]},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "tool_reference", "tool_name": "later"}]},
        {"role": "assistant", "reasoning_details": [{"text": "r"}], "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "developer", "content": "d"},
    ],
    "tools": [
        {"type": "function", "function": FUNCTION},
        {"function": _WAITING},
        {"type": "custom", "custom": {"name": "patch", "description": "d", "format": FORMAT}, "defer_loading": False},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "f"}}]}},
    "chat_template_kwargs": {"k": 1},
}
RESPONSES: dict[str, Any] = {
    "instructions": "i",
    "input": [
        {"type": "message", "role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "t"}, {"type": "input_image"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}], "encrypted_content": "text:cg=="},
        {"type": "reasoning", "content": [], "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
        {"type": "function_call", "call_id": "a", "name": "g", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "output_text", "text": "t"}]},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "i"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "t"},
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"q": "x"}},
        {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function", "name": "late"}]},
        {"type": "additional_tools", "tools": [{"type": "namespace", "name": "m", "tools": [FUNCTION]}]},
        {"type": "web_search_call", "id": "w"},
    ],
    "tools": [
        {"type": "function", **FUNCTION},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g", "defer_loading": True}]},
        {"type": "custom", "name": "patch", "description": "d", "format": FORMAT},
        {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "text"}},
}
_BLOCKS = [
    {"type": "text", "text": "t"},
    {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "t"}]},
    {"type": "image", "source": {"type": "base64", "data": "YQ=="}},
    {"type": "document", "title": "t", "context": "c", "source": {"type": "text", "data": "d"}},
]
MESSAGES: dict[str, Any] = {
    "max_tokens": 1,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": _BLOCKS},
        {"role": "system", "content": "s"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "r", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "t"},
                {"type": "mcp_tool_use", "id": "m"},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "b", "name": "find"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [*_BLOCKS, {"type": "odd"}], "is_error": True},
                {
                    "type": "tool_result",
                    "tool_use_id": "b",
                    "content": [{"type": "tool_reference", "tool_name": "later"}],
                },
                {"type": "web_search_tool_result"},
                {"type": "text", "text": "t"},
            ],
        },
    ],
    "tools": [
        {"name": "f", "description": "d", "input_schema": {"type": "object"}},
        {"type": "custom", **_WAITING},
        {"name": "find"},
        {"type": "web_search_1"},
    ],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "output_config": {"effort": "low", "format": None},
}
DECISIONS: dict[str, Any] = {"input": RESPONSES["input"][:5], "questions": [{"type": "predicate", "instructions": "i"}]}
# Kinds that stand nowhere above: in a place of that path.
KINDS: dict[str, tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]] = {
    "chat": (
        (("messages", 1, "content", 0, "type"), ("hologram", "reasoning_text", "tool_reference", "input_json")),
        (("messages", 3, "content", 0, "type"), ("hologram", "video_url")),
        (("messages", 1, "role"), ("tool", "assistant", "wizard")),
        (("messages", 4, "content", 0, "tool_name"), ("f", "unknown")),
        (("tools", 2, "custom", "format", "type"), ("text", "xml")),
        (("tools", 2, "custom", "format", "syntax"), ("lark", "other")),
        (("tools", 0, "type"), ("custom", "namespace")),
        (("chat_template_kwargs",), ({"tools": 1}, {"no name": 1})),
    ),
    "responses": (
        (("input", 0, "type"), ("item_reference", "compaction", "reasoning", "function_call", "custom_tool_call")),
        (("input", 0, "type"), ("additional_tools", "tool_search_output", "function_call_output")),
        (("input", 1, "content", 0, "type"), ("hologram", "output_text")),
        (("input", 6, "output", 0, "type"), ("hologram", "image")),
        (("input",), ([{"type": "web_search_call"}], "t")),
        (("tools", 0, "type"), ("custom", "namespace", "tool_search")),
        (("tools", 1, "tools", 0, "type"), ("custom", "other")),
    ),
    "messages": (
        (("messages", 0, "content", 0, "type"), ("hologram", "tool_use", "tool_result", "thinking", "tool_reference")),
        (("messages", 2, "content", 2, "type"), ("tool_result", "search_result", "image")),
        (("messages", 3, "content", 0, "content", 0, "type"), ("tool_use", "hologram")),
        (("messages", 3, "content", 1, "content", 0, "tool_name"), ("f", "unknown")),
        (("messages", 0, "role"), ("assistant", "system", "tool")),
        (("messages", 0, "content"), ("t",)),
        (("messages",), (slice(0, 3), slice(0, 2))),
        (("system",), ("s",)),
        (("system", 0, "type"), ("image", "thinking", "search_result")),
        (("tools", 0, "type"), ("tool_search_tool_regex", "custom")),
    ),
    "decisions": (),
}


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value within a body."""
    if way:
        yield way
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*way, key))


def changed(body: dict[str, Any], way: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return a copy of the body with another value in one place, or without it."""
    body = copy.deepcopy(body)
    part: Any = body
    for key in way[:-1]:
        part = part[key]
    if isinstance(value, slice):
        part[way[-1]] = part[way[-1]][value]
    elif value == MISSING:
        del part[way[-1]]
    else:
        part[way[-1]] = value
    return body


def mistakes(dialect: str, body: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any, dict[str, Any]]]:
    """Yield place, value and body of every change."""
    for way in places(body):
        for value in VALUES:
            yield way, value, changed(body, way, value)
    for way, values in KINDS[dialect]:
        for value in values:
            yield way, value, changed(body, way, value)
