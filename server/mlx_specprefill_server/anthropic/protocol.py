"""Anthropic's request bodies, content blocks and tools, and their translation to OpenAI's messages.

Refusals name the place in the request. Blocks that only the provider's servers can make or read are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from mlx_specprefill import Probability

from ..constrained.output_format import OUTPUT_FIELDS, OutputFormat, response_format
from ..constrained.tool_choice import NamedTool, ToolChoice
from ..fields import Body, Budget, ChatFields, StopStrings, ThinkingFields, refuse_documents, refuse_sampling
from ..http.errors import refusal, require
from ..prompt.conversation import (
    REFERENCE,
    Conversation,
    Ending,
    Message,
    conversation,
    function_of,
    objects,
    parts_of,
    references_in,
    string_of,
    unknown_tool,
    unread_parts,
)
from ..prompt.deferred import deferral_of
from ..prompt.files import MEDIA, read_media

LEFT_OUT = {
    "redacted_thinking", "server_tool_use", "mcp_tool_use", "tool_reference", "browser_state",
}  # fmt: skip
SEARCH = "tool_search_tool_"  # begins the types of tools with which Anthropic's server searches
NO_SEARCH = (
    "this server does not search for tools: let the client search, with a tool of its own whose results hold "
    "tool_reference blocks (ENABLE_TOOL_SEARCH has Claude Code do so), or send the tools without defer_loading"
)
OWN = (None, "custom")  # types of the client's own tools

Blocks = list[tuple[str, dict[str, Any]]]  # each with its path


class Choice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class OutputConfig(Body):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountRequest(ThinkingFields):
    """The body of POST /v1/messages/count_tokens: the parts of a prompt."""

    model: str | None = None
    messages: list[Any]
    system: Any = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Choice = Choice()
    output_config: OutputConfig = OutputConfig()
    output_format: dict[str, Any] | None = None  # the older name of output_config.format
    response_format: Any = None
    structured_outputs: Any = None
    json_schema: Any = None
    grammar: Any = None

    def choice(self) -> ToolChoice:
        """Return the tool choice in dialect-neutral form."""
        if self.tool_choice.type == "tool":
            return NamedTool(self.tool_choice.name)
        return "required" if self.tool_choice.type == "any" else self.tool_choice.type

    def conversation(self) -> Conversation:
        messages = chat_messages(self.system, self.messages)
        return conversation(
            messages,
            function_tools(self.tools),
            self.template_kwargs(self.output_config.effort),
            _ending(messages),
            left_out=(
                *unread_parts(self.messages, "messages"),
                *_unknown_tools(self.tools),
                *_foreign(self.messages),
                *self._other_formats(),
            ),
            any_tool_loads=True,
            opening_in_front=False,
        )

    def output(self) -> OutputFormat | None:
        own, older = self.output_config.format, self.output_format
        require(own is None or older is None, "output_format", "can't be combined with output_config.format")
        return response_format(older, "output_format") or response_format(own, "output_config.format")

    def _other_formats(self) -> Iterator[str]:
        """Yield a sentence for each field that sets the format in another dialect."""
        for name in OUTPUT_FIELDS:
            if name in self.model_fields_set:
                yield f"{name} has no effect in this dialect; use output_config.format"


class MessagesRequest(CountRequest, ChatFields):
    """The body of POST /v1/messages."""

    max_tokens: Budget
    temperature: Probability | None = None  # a half of OpenAI's range
    stop_sequences: StopStrings = ()

    def limit(self) -> int | None:
        return self.max_tokens

    def stops(self) -> tuple[str, ...]:
        return self.stop_sequences

    def parallel(self) -> bool:
        return not self.tool_choice.disable_parallel_tool_use


def _ending(messages: Sequence[Message]) -> Ending:
    """Return the prompt's ending. An assistant's message at the end is the beginning of the answer."""
    if not messages or messages[-1]["role"] != "assistant":
        return "answer"
    if "tool_calls" in messages[-1]:
        raise refusal("messages", "the last tool_use has no tool_result")
    return "continue"


def refuse(body: Mapping[str, Any]) -> None:
    """Refuse fields of this dialect that no local model can serve, by an InvalidRequestError."""
    for name in ("mcp_servers", "container"):
        if body.get(name):
            raise refusal(name, "not supported")
    refuse_sampling(body)
    refuse_documents(body)


def _foreign(messages: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for each block of a tool that the provider's servers run, and for a misplaced reference."""
    for path, block in parts_of(messages, "messages"):
        if (kind := block["type"]).startswith("mcp_tool"):
            yield f"{path}: {kind} was left out: tools of MCP servers are called by the provider"
        elif kind == REFERENCE:
            yield f"{path}: {kind} was left out: it loads a tool within a tool_result"


def _unknown_tools(tools: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for each tool that runs on the provider's servers. Refuse their search for deferred tools."""
    for where, tool in objects(tools, "tools"):
        kind = tool.get("type")
        require(not (isinstance(kind, str) and kind.startswith(SEARCH)), f"{where}.type", NO_SEARCH)
        if kind not in OWN:
            yield unknown_tool(where, kind)


def chat_messages(system: Any, messages: Sequence[Any]) -> list[Message]:
    """Return the conversation as OpenAI's messages.

    Raises:
        InvalidRequestError: `field` is the path of the value at fault, like `messages[0].content[1].type`.
    """
    out: list[Message] = []
    for where, block in _blocks(system, "system"):
        require(block["type"] not in MEDIA, f"{where}.type", "must be text")
    if (text := _join_texts(system, "system")) != "":
        out.append({"role": "system", "content": text})
    for where, message in objects(messages, "messages"):
        out += _message(message, where)
    return out


def function_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the client's own tools as OpenAI's functions. Tools that run on the provider's servers are left out."""
    return [
        {"type": "function", "function": function_of(tool, where, "input_schema"), **deferral_of(tool, where)}
        for where, tool in objects(tools, "tools")
        if tool.get("type") in OWN
    ]


def _message(message: dict[str, Any], where: str) -> Iterator[Message]:
    content = message.get("content")
    match message.get("role"):
        case "user":
            yield from _user(_blocks(content, f"{where}.content"))
        case "assistant":
            yield _assistant(_blocks(content, f"{where}.content"))
        case "system":
            yield {"role": "system", "content": _join_texts(content, f"{where}.content")}
        case _:
            raise refusal(f"{where}.role", "must be user, assistant or system")


def _blocks(content: Any, where: str) -> Blocks:
    """Return the content as blocks. A string is one text block."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if content is None:
        return []
    require(isinstance(content, list), where, "must be a string or an array of blocks")
    blocks = list(objects(content, where))
    for path, block in blocks:
        string_of(block, "type", path)
    return blocks


def _user(blocks: Blocks) -> Iterator[Message]:
    """Return text and tool results in their order. Each result is a message of its own."""
    texts: list[str] = []
    for where, block in blocks:
        if block["type"] != "tool_result":
            texts += _texts(block, where)
            continue
        if texts:
            yield {"role": "user", "content": "\n".join(texts)}
            texts = []
        yield _tool_result(block, where)
    if texts or all(block["type"] != "tool_result" for _, block in blocks):
        # Blocks of which none is shown leave a note: without the user's message the answer before it would go on.
        notes = (f"[{block['type']:.40} left out]" for _, block in blocks)
        yield {"role": "user", "content": "\n".join(texts or notes)}


def _tool_result(block: dict[str, Any], where: str) -> Message:
    call = string_of(block, "tool_use_id", where)
    content = block.get("content")
    loads = references_in(content, f"{where}.content") if isinstance(content, list) else {}
    text = _join_texts(content, f"{where}.content", of_a_tool=True)
    if block.get("is_error") is True and "error" not in text[:80].lower():  # templates have no other place for it
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": call, "content": text, **loads}


def _assistant(blocks: Blocks) -> Message:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for where, block in blocks:
        match block["type"]:
            case "thinking":
                thoughts.append("" if block.get("thinking") is None else string_of(block, "thinking", where))
            case "tool_use":
                calls.append(_tool_use(block, where))
            case _:
                texts += _texts(block, where)
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(filter(None, thoughts))
    return message | ({"tool_calls": calls} if calls else {})


def _tool_use(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input") or {}
    require(isinstance(arguments, dict), f"{where}.input", "must be an object")
    function = {"name": string_of(block, "name", where), "arguments": arguments}
    return {"id": string_of(block, "id", where), "type": "function", "function": function}


def _join_texts(content: Any, where: str, of_a_tool: bool = False) -> str:
    return "\n".join(text for path, block in _blocks(content, where) for text in _texts(block, path, of_a_tool))


def _texts(block: dict[str, Any], where: str, of_a_tool: bool = False) -> list[str]:
    """Return the texts of a block that a template can show.

    Raises:
        InvalidRequestError: the block is not text, is no part of a tool's result, and leaving it out would change the
            conversation's meaning.
    """
    match block["type"]:
        case "text":
            return [string_of(block, "text", where)]
        case "search_result":
            head = [text for name in ("title", "source") if isinstance(text := block.get(name), str)]
            return ["\n".join([*head, _join_texts(block.get("content"), f"{where}.content")])]
        case kind if kind in LEFT_OUT or kind.endswith("_tool_result"):
            return []
        case kind if of_a_tool or kind in MEDIA:
            return [read_media(block)[0]]
        case kind:
            raise refusal(f"{where}.type", f"only text can be read by this model, got {kind!r:.80}")
