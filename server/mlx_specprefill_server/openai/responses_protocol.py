"""The request body, items and tools of /v1/responses, and their translation to chat messages.

Refusals name the place in the request. Items that only the provider's own tools leave behind are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from ..constrained.output_format import OutputFormat, response_format
from ..errors import refusal, require
from ..fields import Body, MaxTokens, Texts, Whole, first_limit, refuse_documents, refuse_sampling
from ..prompt.conversation import (
    Conversation,
    Message,
    conversation,
    function_of,
    image_paths,
    inline_system_messages,
    objects,
    string_of,
    text_of,
)
from .protocol import ConversationFields

LOGPROBS = "message.output_text.logprobs"
STATELESS = "this server keeps no responses or conversations; send the whole conversation as input"

ROLES = ("user", "assistant", "system", "developer")
UNREADABLE = {
    "item_reference": "this server keeps no items; send the item itself",
    "compaction": "only the provider that made it can read it",
}


def _input(value: Any) -> str | list[Any]:
    if not isinstance(value, str | list) or not value:
        raise ValueError("must be a non-empty string or array of items")
    return value


class Text(Body):
    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})


class ResponsesRequest(ConversationFields):
    """The body of POST /v1/responses and /v1/responses/input_tokens."""

    input: Annotated[str | list[Any], PlainValidator(_input, json_schema_input_type=str | list[Any])]
    instructions: str | None = None
    text: Text = Text()
    max_output_tokens: MaxTokens | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] = 0
    include: list[Any] = Field(default_factory=list)
    metadata: Texts = Field(default_factory=dict)
    prompt_cache_key: str | None = None
    user: str | None = None

    @cached_property
    def functions(self) -> Tools:
        """The function tools; raises InvalidRequestError."""
        return function_tools(self.tools)

    def conversation(self) -> Conversation:
        messages = inline_system_messages(chat_messages(self.instructions, self.input))
        kwargs = self.thinking_kwargs() | self.chat_template_kwargs
        images = tuple(image_paths([] if isinstance(self.input, str) else self.input, "input"))
        return conversation(messages, self.functions.functions, kwargs, field="input", images=images)

    def alternatives(self) -> int | None:
        return self.top_logprobs if self.top_logprobs or LOGPROBS in self.include else None

    def limit(self) -> int | None:
        return first_limit(self.max_output_tokens, self.max_tokens, self.n_predict)

    def output(self) -> OutputFormat | None:
        """Return the text's required form: `text.format`, or a field of the same meaning from another endpoint."""
        own, other = response_format(self.text.format, "text.format"), super().output()
        if own is not None and other is not None:
            raise refusal(other.field, "can't be combined with text.format")
        return own or other


def refuse(body: Mapping[str, Any]) -> None:
    """Refuse fields that need a memory between requests, or work after the answer, by an InvalidRequestError."""
    for name in ("previous_response_id", "conversation"):
        if body.get(name):
            raise refusal(name, STATELESS)
    refuse_sampling(body)
    refuse_documents(body)
    if body.get("echo"):
        raise refusal("echo", "not supported")
    for name in ("max_output_tokens", "max_tokens", "n_predict"):
        if body.get(name) == 0:
            raise refusal(name, "must be at least 1")
    if body.get("n", 1) != 1:
        raise refusal("n", "a response is one answer")
    for name in ("background", "prompt"):
        if body.get(name):
            raise refusal(name, "not supported")


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
        for where, item in objects(given, "input"):
            _item(builder, item, where)
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


def _item(builder: _Builder, item: Mapping[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "message":
            _message(builder, item, where)
        case "reasoning":
            text = text_of(item.get("content"), f"{where}.content") or text_of(item.get("summary"), f"{where}.summary")
            builder.say(text, "reasoning_content")
        case "function_call":
            builder.call(string_of(item, "call_id", where), string_of(item, "name", where), item.get("arguments"))
        case "custom_tool_call":
            arguments = {"input": string_of(item, "input", where)}
            builder.call(string_of(item, "call_id", where), string_of(item, "name", where), arguments)
        case "function_call_output" | "custom_tool_call_output":
            text = text_of(item.get("output"), f"{where}.output", of_a_tool=True)
            builder.add({"role": "tool", "tool_call_id": string_of(item, "call_id", where), "content": text})
        case kind:
            require(isinstance(kind, str), f"{where}.type", "must be a string")
            require(kind not in UNREADABLE, f"{where}.type", f"{kind!r}: {UNREADABLE.get(kind)}")


def _message(builder: _Builder, item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    require(role in ROLES, f"{where}.role", f"must be one of {', '.join(ROLES)}")
    text = text_of(item.get("content"), f"{where}.content")
    if role == "assistant":
        builder.say(text)
    else:
        builder.add({"role": role, "content": text})


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
    for where, tool in objects(tools, "tools"):
        kind = tool.get("type", "function")
        if kind == "function":
            yield _function(tool, where), None
        elif kind == "namespace":
            spaces.append((where, tool))
    for where, space in spaces:
        name = string_of(space, "name", where)
        inner = space.get("tools")
        require(isinstance(inner, list), f"{where}.tools", "must be an array")
        for place, tool in objects(inner or [], f"{where}.tools"):
            if tool.get("type", "function") == "function":
                yield _function(tool, place), name


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    strict = {"strict": True} if tool.get("strict") is True else {}
    return function_of(tool, where, "parameters") | strict
