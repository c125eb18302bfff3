"""The request body, items and tools of /v1/responses, and their translation to chat messages.

Refusals name the place in the request. Items that only the provider's own tools leave behind are skipped.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from ..constrained.output_format import OutputFormat, response_format
from ..fields import Body, MaxTokens, Texts, Whole, first_limit, refuse_documents, refuse_sampling
from ..http.errors import refusal, require
from ..prompt.conversation import (
    Conversation,
    Message,
    conversation,
    function_of,
    objects,
    string_of,
    text_of,
    unknown_tool,
    unread_parts,
)
from ..prompt.deferred import FLAG, LOADS, Reference, deferral_of
from .custom_tools import Origin, Source, Tools, custom_function, input_patterns
from .protocol import ConversationFields

TOOL_SEARCH = "tool_search"  # a type of tools, and the name under which the model calls it
NOTHING_FOUND = "No tool was found."
LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
SEAL = "text:"  # begins reasoning in base64
STATELESS = "this server keeps no responses or conversations; send the whole conversation as input"

ROLES = ("user", "assistant", "system", "developer")
UNREADABLE = {
    "item_reference": "this server keeps no items; send the item itself",
    "compaction": "only the provider that made it can read it",
}


def input_of(value: Any) -> str | list[Any]:
    """Return the input, a text or items. Raises ValueError."""
    if not isinstance(value, str | list) or not value:
        raise ValueError("must be a non-empty string or array of items")
    return value


class Text(Body):
    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})


class ResponsesRequest(ConversationFields):
    """The body of POST /v1/responses and /v1/responses/input_tokens."""

    input: Annotated[str | list[Any], PlainValidator(input_of, json_schema_input_type=str | list[Any])]
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
        return function_tools(self.tools, () if isinstance(self.input, str) else self.input)

    def conversation(self) -> Conversation:
        tools = self.functions
        read = read_items(self.instructions, self.input, tools.shown)
        unread = unread_parts([] if isinstance(self.input, str) else self.input, "input")
        made = conversation(
            read.messages,
            tools.functions,
            self.template_kwargs(),
            field="input",
            left_out=(*unread, *tools.left_out, *read.left_out.values()),
            opening_in_front=False,
        )
        return replace(made, inputs=tools.inputs) if tools.inputs else made

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
    if body.get("n", 1) != 1:
        raise refusal("n", "a response is one answer")
    for name in ("background", "prompt"):
        if body.get(name):
            raise refusal(name, "not supported")


def read_items(instructions: str | None, given: str | Sequence[Any], shown: Mapping[Origin, str]) -> _Builder:
    """Return the builder of the conversation's chat messages. `shown` is as in Tools.

    Raises:
        InvalidRequestError: `field` is the path of the value at fault, like `input[0].content[1].type`.
    """
    builder = _Builder(shown)
    if instructions:
        builder.add({"role": "system", "content": instructions})
    if isinstance(given, str):
        builder.add({"role": "user", "content": given})
    else:
        for where, item in objects(given, "input"):
            _item(builder, item, where)
    require(bool(builder.messages), "input", f"no message is left: {'; '.join(builder.left_out.values())}")
    return builder


class _Builder:
    """A builder of messages. The assistant's consecutive items (thinking, text, calls) become one message.

    Attributes:
        left_out: a sentence for each kind of item that is not in them.
    """

    def __init__(self, shown: Mapping[Origin, str]) -> None:
        self.messages: list[Message] = []
        self.left_out: dict[str, str] = {}
        self._shown = shown

    def add(self, message: Message) -> None:
        self.messages.append(message)

    def say(self, text: str, name: str = "content") -> None:
        message = self._assistant()
        message[name] = "\n".join(filter(None, (message.get(name), text)))

    def call(self, item: Mapping[str, Any], where: str, arguments: Any) -> None:
        name = string_of(item, "name", where)
        space = item.get("namespace")
        shown = self._shown.get((space, name), name) if isinstance(space, str) else name
        self.add_call(string_of(item, "call_id", where), shown, arguments)

    def add_call(self, call_id: str, name: str, arguments: Any) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def loads(self, item: Mapping[str, Any], where: str) -> list[Reference]:
        """Return references to the tools that an item brings with it."""
        origins = [origin for _, origin, _ in _functions(_tools_of(item, where))]
        return [Reference(self._shown.get(origin, origin[1]), f"{where}.tools") for origin in origins]

    def _assistant(self) -> Message:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def sealed(text: str) -> str:
    """Return reasoning as `encrypted_content`, which some clients send back instead of the text. It is no secret."""
    return SEAL + b64encode(text.encode()).decode()


def _unsealed(content: Any) -> str:
    """Return the text that was sealed, "" for what another server has made."""
    if not isinstance(content, str) or not content.startswith(SEAL):
        return ""
    try:
        return b64decode(content.removeprefix(SEAL), validate=True).decode()
    except ValueError:
        return ""


def _item(builder: _Builder, item: Mapping[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "message":
            _message(builder, item, where)
        case "reasoning":
            text = text_of(item.get("content"), f"{where}.content") or _unsealed(item.get("encrypted_content"))
            text = text or text_of(item.get("summary"), f"{where}.summary")
            builder.say(text, "reasoning_content")
        case "function_call":
            builder.call(item, where, item.get("arguments"))
        case "custom_tool_call":
            builder.call(item, where, {"input": string_of(item, "input", where)})
        case "function_call_output" | "custom_tool_call_output":
            text = text_of(item.get("output"), f"{where}.output", of_a_tool=True)
            builder.add({"role": "tool", "tool_call_id": string_of(item, "call_id", where), "content": text})
        case "tool_search_call" if _of_client(item):
            builder.add_call(item["call_id"], TOOL_SEARCH, item.get("arguments"))
        case "tool_search_output" if _of_client(item):
            loads = builder.loads(item, where)
            found = {LOADS: tuple(loads), "content": ""} if loads else {"content": NOTHING_FOUND}
            builder.add({"role": "tool", "tool_call_id": item["call_id"], **found})
        case "additional_tools":
            builder.add({"role": "user", "content": "", LOADS: tuple(builder.loads(item, where))})
        case kind:
            require(isinstance(kind, str), f"{where}.type", "must be a string")
            require(kind not in UNREADABLE, f"{where}.type", f"{kind!r}: {UNREADABLE.get(kind)}")
            builder.left_out.setdefault(kind, unknown_tool(where, kind))


def _message(builder: _Builder, item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    require(role in ROLES, f"{where}.role", f"must be one of {', '.join(ROLES)}")
    text = text_of(item.get("content"), f"{where}.content")
    if role == "assistant":
        builder.say(text)
    else:
        builder.add({"role": role, "content": text})


def _of_client(item: Mapping[str, Any]) -> bool:
    """Return whether a search's item is of a client's. Those of a server's have no call's id."""
    return isinstance(item.get("call_id"), str)


def _tools_of(item: Mapping[str, Any], where: str) -> list[Source]:
    tools = item.get("tools")
    require(isinstance(tools, list), f"{where}.tools", "must be an array")
    return list(objects(tools or (), f"{where}.tools"))


def function_tools(tools: Sequence[Any], items: Sequence[Any] = ()) -> Tools:
    """Return functions, also those in namespaces, and those that items bring. Tools that run on the provider's servers
    are left out.

    Raises:
        InvalidRequestError: `field` is the path of the value at fault.
    """
    given, brought = list(objects(tools, "tools")), list[Source]()
    for where, item in objects(items, "input"):
        if item.get("type") in ("tool_search_output", "additional_tools"):
            brought += _tools_of(item, where)
    functions: dict[str, dict[str, Any]] = {}
    shown: dict[Origin, str] = {}
    custom: dict[str, Source] = {}
    for later, part in enumerate((given, brought)):
        for function, origin, source in _functions(part):
            name = _shown_name(origin, functions)
            if name is None or origin in shown:
                continue
            flag = deferral_of(source[1], source[0]) | ({FLAG: True} if later else {})
            functions[name] = {"type": "function", "function": {**function, "name": name}, **flag}
            shown[origin] = name
            if source[1].get("type") == "custom":
                custom[name] = source
    left_out = list(_left_out([*given, *brought]))
    inputs = dict(input_patterns(custom, left_out))
    search = next((source for source in given if _is_search(source[1])), None)
    if search is not None:
        named = function_of({**search[1], "name": TOOL_SEARCH}, search[0], "parameters")
        functions.setdefault(TOOL_SEARCH, {"type": "function", "function": named})
    return Tools(tuple(functions.values()), frozenset(custom), inputs, tuple(left_out), shown, search is not None)


def _shown_name(origin: Origin, taken: Container[str]) -> str | None:
    """Return the name under which the model sees a function: its own, or behind its namespace where that is taken.

    None: both are. A call could not name it.
    """
    namespace, name = origin
    names = (name,) if namespace is None else (name, f"{namespace}__{name}")
    return next((name for name in names if name not in taken), None)


def _left_out(tools: Sequence[Source]) -> Iterator[str]:
    for _, (where, tool) in _each(tools):
        kind = tool.get("type", "function")
        if kind not in ("function", "custom") and not _is_search(tool):
            yield unknown_tool(where, kind)


def _each(tools: Sequence[Source], space: str | None = None) -> Iterator[tuple[str | None, Source]]:
    """Yield each tool behind the name of its namespace."""
    for where, tool in tools:
        if tool.get("type") == "namespace":
            yield from _each(_tools_of(tool, where), string_of(tool, "name", where))
        else:
            yield space, (where, tool)


def _is_search(tool: Mapping[str, Any]) -> bool:
    """Return whether the client searches for deferred tools with this one."""
    return tool.get("type") == TOOL_SEARCH and bool(tool.get("execution") == "client" or tool.get("parameters"))


def _functions(tools: Sequence[Source]) -> Iterator[tuple[dict[str, Any], Origin, Source]]:
    """Yield functions with their origins and sources. Those without a namespace come first, so that they win over
    others of the same name.
    """
    for space, (where, tool) in sorted(_each(tools), key=lambda each: each[0] is not None):
        if tool.get("type", "function") in ("function", "custom"):
            function = _function(tool, where)
            yield function, (space, function["name"]), (where, tool)


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") == "custom":
        return custom_function(tool, where)
    strict = {"strict": True} if tool.get("strict") is True else {}
    return function_of(tool, where, "parameters") | strict
