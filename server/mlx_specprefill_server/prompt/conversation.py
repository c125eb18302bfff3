"""Normalised conversations: messages and tools in the form that chat templates take, whatever the dialect.

Agents send forms that templates can't render (a second system message, null content, arguments as a JSON string). This
module normalises them for all dialects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import orjson

from mlx_specprefill import InvalidRequestError

Message = dict[str, Any]  # in the form of templates: role, content (str), and the role's other fields
Ending = Literal["answer", "continue", "none"]

ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_TEXT_ONLY = {"role", "content", "name"}
# apply_chat_template's own arguments, which a request must not set
RESERVED_KWARGS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages ready for a template. At most one is a system message, and it comes first.

    Attributes:
        ending: "answer": the prompt opens the assistant's answer; "continue": it stops within the last message, which
            the answer continues; "none": it ends after the last message.
        field: name of the body's field in errors about the prompt.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    ending: Ending = "answer"
    field: str = "messages"


def conversation(
    messages: Sequence[Any],
    tools: Sequence[Any] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    ending: Ending = "answer",
    field: str = "messages",
) -> Conversation:
    """Check and normalise OpenAI's chat messages.

    Raises:
        InvalidRequestError: `field` is the path of the value at fault, like `messages[0].content[1].type`.
    """
    normalised = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not normalised:
        raise InvalidRequestError(f"{field} must not be empty", field=field)
    return Conversation(
        messages=tuple(_system_first(normalised)),
        tools=tuple(_tools(tools)),
        template_kwargs=_template_kwargs(template_kwargs or {}),
        ending=ending,
        field=field,
    )


def ending_of(add_generation_prompt: bool | None, continue_final_message: bool) -> Ending:
    """Return the ending that vLLM's two fields ask for together.

    Raises:
        InvalidRequestError: both are asked for.
    """
    if continue_final_message and add_generation_prompt:
        message = "continue_final_message: can't be combined with add_generation_prompt"
        raise InvalidRequestError(message, field="continue_final_message")
    if continue_final_message:
        return "continue"
    return "none" if add_generation_prompt is False else "answer"


def simpler_forms(messages: Sequence[Message]) -> Iterator[tuple[Message, ...]]:
    """Yield other forms of a conversation, for templates that refuse it unchanged.

    Some need alternating user and assistant messages, and some of those have no system message.
    """
    yield tuple(_in_turns(messages))
    if len(messages) > 1 and messages[0]["role"] == "system":
        yield tuple(_in_turns([messages[0] | {"role": "user"}, *messages[1:]]))


def _in_turns(messages: Sequence[Message]) -> list[Message]:
    """Join neighbours of one role into one message, unless that would tear calls or results apart."""
    out: list[Message] = []
    for message in messages:
        before = out[-1] if out else None
        if before is None or before["role"] != message["role"] or not _TEXT_ONLY.issuperset(before | message):
            out.append(message)
        else:
            texts = filter(None, (before["content"], message["content"]))
            out[-1] = before | {"content": "\n\n".join(texts)}
    return out


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{where} must be an object", field=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(f"{where}.role must be one of {', '.join(sorted(ROLES))}", field=f"{where}.role")
    out: Message = {"role": "tool" if role == "function" else role}
    out["content"] = _text(message.get("content"), f"{where}.content", out["role"] == "tool")
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            out[name] = message[name]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        out["reasoning_content"] = out["reasoning"] = reasoning
    if role == "assistant" and message.get("tool_calls"):
        out["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    elif role == "assistant" and message.get("function_call"):  # OpenAI's older form of a single call
        out["tool_calls"] = [_tool_call({"function": message["function_call"]}, f"{where}.function_call")]
    return out


def omission_note(kind: str) -> str:
    """Return the text that stands for an image, a file or the like in a tool's result.

    A refusal would end an agent's session: a tool's result stays in the history of all later requests.
    """
    return f"[{kind.removeprefix('input_').removesuffix('_url')[:40]} left out: this model reads text only]"


def _text(content: Any, where: str, of_a_tool: bool) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string or an array of parts", field=where)
    return "\n".join(_part(part, f"{where}[{i}]", of_a_tool) for i, part in enumerate(content))


def _part(part: Any, where: str, of_a_tool: bool) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{where} must be an object", field=where)
    kind = part.get("type", "text")
    if of_a_tool and isinstance(kind, str) and kind not in TEXT_PARTS:
        return omission_note(kind)
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise InvalidRequestError(
            f"{where}.type: only text parts are supported by this model, got {_shorten(kind)}", field=f"{where}.type"
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{TEXT_PARTS[kind]} must be a string", field=f"{where}.{TEXT_PARTS[kind]}")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{where} must be an array", field=where)
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where}.function.name must be a string", field=f"{where}.function.name")
    arguments = _arguments(function.get("arguments"))
    out: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        out["id"] = call["id"]
    return out


def _arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments as a mapping, over which templates iterate. Broken JSON is kept as text: it must not fail
    the session.
    """
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return {"arguments": arguments}
    if isinstance(arguments, dict):
        return arguments
    return {"arguments": arguments} if arguments else {}


def _tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the function tools. Other kinds are the provider's own (web search and the like) and are left out."""
    out = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise InvalidRequestError(f"{where} must be an object", field=where)
        if tool.get("type", "function") != "function":
            continue
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{where}.function.name must be a string", field=f"{where}.function.name")
        out.append({"type": "function", "function": function})
    return out


def _system_first(messages: Sequence[Message]) -> list[Message]:
    """Join the system messages in front. Most templates refuse a second one, or one that is not the first."""
    system = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    rest = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(filter(None, system))}, *rest] if system else rest


def _template_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    for name in kwargs:
        if name in RESERVED_KWARGS or not name.isidentifier():
            raise InvalidRequestError(
                f"chat_template_kwargs: {_shorten(name)} can't be set by a request", field="chat_template_kwargs"
            )
    return dict(kwargs)


def _shorten(value: Any) -> str:
    return repr(value)[:80]


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
