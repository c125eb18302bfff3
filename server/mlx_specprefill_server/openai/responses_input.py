"""Translation of the items and tools of /v1/responses to chat messages.

Refusals name the place in the request. Items that only the provider's own tools leave behind are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_specprefill import InvalidRequestError

from ..prompting.conversation import Message, omission_note

__all__ = ["Tools", "chat_messages", "function_tools"]

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = {
    "text": "text", "input_text": "text", "output_text": "text", "reasoning_text": "text", "summary_text": "text",
    "refusal": "refusal",
}  # fmt: skip
UNREADABLE = {
    "item_reference": "this server keeps no items; send the item itself",
    "compaction": "only the provider that made it can read it",
}


def chat_messages(instructions: str | None, given: str | Sequence[Any]) -> list[Message]:
    """Return the conversation as chat messages.

    Raises:
        InvalidRequestError: `field` is the path of the value at fault, like `input[0].content[1].type`.
    """
    builder = _Builder()
    if instructions:
        builder.add({"role": "system", "content": instructions})
    if isinstance(given, str):
        builder.add({"role": "user", "content": given})
    else:
        for i, item in enumerate(given):
            _item(builder, item, f"input[{i}]")
    return builder.messages


class _Builder:
    """A builder of messages. The assistant's consecutive items (thinking, text, calls) become one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def add(self, message: Message) -> None:
        self.messages.append(message)

    def say(self, text: str, name: str = "content") -> None:
        message = self._assistant()
        message[name] = "\n".join(filter(None, (message.get(name), text)))

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _assistant(self) -> Message:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _item(builder: _Builder, item: Any, where: str) -> None:
    _require(isinstance(item, dict), where, "must be an object")
    match item.get("type", "message"):
        case "message":
            _message(builder, item, where)
        case "reasoning":
            text = _text(item.get("content"), f"{where}.content") or _text(item.get("summary"), f"{where}.summary")
            builder.say(text, "reasoning_content")
        case "function_call":
            builder.call(_string(item, "call_id", where), _string(item, "name", where), item.get("arguments"))
        case "custom_tool_call":
            arguments = {"input": _string(item, "input", where)}
            builder.call(_string(item, "call_id", where), _string(item, "name", where), arguments)
        case "function_call_output" | "custom_tool_call_output":
            text = _text(item.get("output"), f"{where}.output", of_a_tool=True)
            builder.add({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": text})
        case kind:
            _require(isinstance(kind, str), f"{where}.type", "must be a string")
            _require(kind not in UNREADABLE, f"{where}.type", f"{kind!r}: {UNREADABLE.get(kind)}")


def _message(builder: _Builder, item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    _require(role in ROLES, f"{where}.role", f"must be one of {', '.join(ROLES)}")
    text = _text(item.get("content"), f"{where}.content")
    if role == "assistant":
        builder.say(text)
    else:
        builder.add({"role": role, "content": text})


def _text(content: Any, where: str, of_a_tool: bool = False) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    _require(isinstance(content, list), where, "must be a string or an array of parts")
    return "\n".join(_part(part, f"{where}[{i}]", of_a_tool) for i, part in enumerate(content))


def _part(part: Any, where: str, of_a_tool: bool) -> str:
    _require(isinstance(part, dict), where, "must be an object")
    kind = part.get("type")
    if of_a_tool and isinstance(kind, str) and kind not in TEXT_PARTS:
        return omission_note(kind)
    known = isinstance(kind, str) and kind in TEXT_PARTS
    _require(known, f"{where}.type", f"only text can be read by this model, got {kind!r:.80}")
    return _string(part, TEXT_PARTS[kind], where)


@dataclass(frozen=True, slots=True)
class Tools:
    """The client's functions as chat completions take them, and the namespaces that some of them came in."""

    functions: tuple[dict[str, Any], ...]
    namespaces: Mapping[str, str]  # function name: namespace


def function_tools(tools: Sequence[Any]) -> Tools:
    """Return functions, also those in namespaces. Tools that run on the provider's servers are left out.

    Raises:
        InvalidRequestError: `field` is the path of the value at fault.
    """
    functions: dict[str, dict[str, Any]] = {}
    namespaces: dict[str, str] = {}
    for function, namespace in _functions(tools):
        name = function["name"]
        if name in functions:
            continue  # a call could not name one of them
        functions[name] = function
        if namespace is not None:
            namespaces[name] = namespace
    return Tools(tuple({"type": "function", "function": function} for function in functions.values()), namespaces)


def _functions(tools: Sequence[Any]) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Return functions with their namespaces. Those without one come first, so that they win over others of the same
    name.
    """
    spaces: list[tuple[str, dict[str, Any]]] = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        _require(isinstance(tool, dict), where, "must be an object")
        kind = tool.get("type", "function")
        if kind == "function":
            yield _function(tool, where), None
        elif kind == "namespace":
            spaces.append((where, tool))
    for where, space in spaces:
        name = _string(space, "name", where)
        inner = space.get("tools")
        _require(isinstance(inner, list), f"{where}.tools", "must be an array")
        for i, tool in enumerate(inner or []):
            _require(isinstance(tool, dict), f"{where}.tools[{i}]", "must be an object")
            if tool.get("type", "function") == "function":
                yield _function(tool, f"{where}.tools[{i}]"), name


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    schema = tool.get("parameters")
    _require(schema is None or isinstance(schema, dict), f"{where}.parameters", "must be an object")
    description = tool.get("description")
    _require(description is None or isinstance(description, str), f"{where}.description", "must be a string")
    function = {"name": _string(tool, "name", where), "description": description or ""}
    strict = {"strict": True} if tool.get("strict") is True else {}
    return {**function, "parameters": schema or {"type": "object"}, **strict}


def _string(value: Mapping[str, Any], name: str, where: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{name}: must be a string", field=f"{where}.{name}")
    return text


def _require(condition: bool, field: str, rule: str) -> None:
    if not condition:
        raise InvalidRequestError(f"{field}: {rule}", field=field)
