"""Canonical conversations: messages and tools in one form, whatever the dialect. Names images that are left out.

Agents send a second system message, null content, arguments as a JSON string, results in the order of completion.
`forms` makes what a particular template takes of the canonical form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, takewhile
from typing import Any, Literal

from ..big_json import dumps, loads
from ..http.errors import refusal, require
from ..settings.values import refused_name
from .deferred import FLAG, LOADS, Deferral, Reference, deferral_of, divide, is_deferred, without_flag
from .files import MEDIA, read_media, unread_media
from .reminders import SYSTEM, place_reminders, reminds

Message = dict[str, Any]  # in the form of templates: role, content (str), and the role's other fields
Ending = Literal["answer", "continue", "none"]

ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
TEXT_PARTS = {
    "text": "text", "input_text": "text", "output_text": "text", "reasoning_text": "text", "summary_text": "text",
    "refusal": "refusal",
}  # fmt: skip
NO_RESULT = "[no result]"
MOST_NAMED = 8  # parts that warnings name
THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details")
REFERENCE = "tool_reference"  # the part of a result that loads a deferred tool


@dataclass(frozen=True, slots=True)
class Conversation:
    """Canonical messages. At most one is a system message, and it comes first.

    Behind a message with calls come their results, one for each and in the order of the calls, unless there is none.
    Each call has an id, and its result has the same.

    Attributes:
        tools: those that stand in front of the messages.
        loaded, waiting: the deferred tools that messages show, and those that they don't.
        inputs: regular expressions that the only argument of a tool, `input`, has to match, by the tool's name.
        ending: "answer": the prompt opens the assistant's answer; "continue": it stops within the last message, which
            the answer continues; "none": it ends after the last message.
        field: name of the body's field in errors about the prompt.
        left_out: sentences about what is not in the messages.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    ending: Ending = "answer"
    field: str = "messages"
    left_out: tuple[str, ...] = ()
    loaded: tuple[Mapping[str, Any], ...] = ()
    waiting: tuple[Mapping[str, Any], ...] = ()

    @property
    def callable_tools(self) -> tuple[Mapping[str, Any], ...]:
        """Return the tools that the prompt shows."""
        return (*self.tools, *self.loaded)


def conversation(
    messages: Sequence[Any],
    tools: Sequence[Any] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    ending: Ending = "answer",
    field: str = "messages",
    left_out: Sequence[str] = (),
    any_tool_loads: bool = False,
    opening_in_front: bool = True,
) -> Conversation:
    """Check and normalise OpenAI's chat messages.

    Args:
        left_out: sentences about what was left out of `messages` when they were translated.
        any_tool_loads: as in `divide`.
        opening_in_front: all system messages before the first answer are the first message. Otherwise those behind
            another message are reminders, like those behind an answer.

    Raises:
        InvalidRequestError: `field` is the path of the value at fault, like `messages[0].content[1].type`.
    """
    normalised = [_message(message, where) for where, message in objects(messages, "messages")]
    if not normalised:
        raise refusal(field, "must not be empty")
    ordered = list(_with_results(_system_first(normalised) if opening_in_front else normalised))
    parts = _divided(_tools(tools), tuple(_system_first(place_reminders(ordered))), any_tool_loads)
    return Conversation(
        messages=parts.messages,
        tools=parts.front,
        template_kwargs=_template_kwargs(template_kwargs or {}),
        ending="answer" if ending == "continue" and reminds(normalised[-1]) else ending,
        field=field,
        left_out=(*left_out, *unread_parts(messages, "messages")),
        loaded=parts.loaded,
        waiting=parts.waiting,
    )


def _divided(tools: list[dict[str, Any]], messages: tuple[Message, ...], any_tool_loads: bool) -> Deferral:
    if any(map(is_deferred, tools)) or any(LOADS in message for message in messages):
        return divide(tools, messages, any_tool_loads)
    return Deferral(tuple(tools), (), (), messages)


def unread_parts(messages: Iterable[Any], where: str) -> Iterator[str]:
    """Yield sentences about images and files without text in the messages of people and assistants, of any dialect."""
    return islice(unread_media(parts_of(messages, where)), MOST_NAMED)


def parts_of(messages: Iterable[Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each part of the messages' contents that is an object with a type by name, and its path."""
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) and message.get("role") != "tool" else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and isinstance(part.get("type"), str):
                yield f"{where}[{i}].content[{j}]", part


def objects(values: Iterable[Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the value of each object in an array. Refuse other values by an InvalidRequestError."""
    for i, value in enumerate(values):
        if not isinstance(value, dict):
            raise refusal(f"{where}[{i}]", "must be an object")
        yield f"{where}[{i}]", value


def ending_of(add_generation_prompt: bool | None, continue_final_message: bool) -> Ending:
    """Return the ending that vLLM's two fields ask for together. Refuse both at once by an InvalidRequestError."""
    if continue_final_message and add_generation_prompt:
        raise refusal("continue_final_message", "can't be combined with add_generation_prompt")
    if continue_final_message:
        return "continue"
    return "none" if add_generation_prompt is False else "answer"


def _message(message: dict[str, Any], where: str) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refusal(f"{where}.role", f"must be one of {', '.join(sorted(ROLES))}")
    out: Message = {"role": "tool" if role == "function" else role}
    content = message.get("content")
    parts = [_typed(part) for part in content] if isinstance(content, list) else content
    if out["role"] == "tool" and isinstance(parts, list):
        out |= references_in(parts, f"{where}.content")
    out["content"] = text_of(parts, f"{where}.content", out["role"] == "tool")
    if isinstance(message.get(LOADS), tuple):  # of another dialect: JSON has no tuples
        out[LOADS] = message[LOADS]
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            out[name] = message[name]
    if thought := next(filter(str.strip, (_thought(message.get(name)) for name in THOUGHTS)), ""):
        out["reasoning_content"] = out["reasoning"] = thought
    if role == "assistant" and message.get("tool_calls"):
        out["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    elif role == "assistant" and message.get("function_call"):  # OpenAI's older form of a single call
        out["tool_calls"] = [_tool_call({"function": message["function_call"]}, f"{where}.function_call")]
    return out


def _thought(given: Any) -> str:
    """Return the text of a thought: a string, or OpenRouter's and MiniMax's form.

    These are texts and summaries, in pieces as they were streamed. Pieces of one index are one text.
    """
    if not isinstance(given, list):
        return given if isinstance(given, str) else ""
    pieces = [(part.get("index"), part.get("text") or part.get("summary")) for part in given if isinstance(part, dict)]
    texts = [(index, text) for index, text in pieces if isinstance(text, str)]
    return "\n\n".join("".join(text for _, text in group) for _, group in groupby(texts, key=lambda piece: piece[0]))


def _typed(part: Any) -> Any:
    """Return the part of a chat message as one with a type. Clients also send bare strings."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "text", **part} if isinstance(part, dict) else part


def references_in(parts: Sequence[Any], where: str) -> dict[str, tuple[Reference, ...]]:
    """Return the references to tools among the parts of a result as the member of its message, if there are some.

    Raises:
        InvalidRequestError: one of them has no name.
    """
    given = [(i, part) for i, part in enumerate(parts) if isinstance(part, dict) and part.get("type") == REFERENCE]
    found = tuple(
        Reference(string_of(part, "tool_name", f"{where}[{i}]"), f"{where}[{i}].tool_name") for i, part in given
    )
    return {LOADS: found} if found else {}


def unknown_tool(where: str, kind: Any) -> str:
    """Return the warning about a tool of the provider's, or what it has left behind."""
    return f"{where}: {kind!r:.80} was left out: this server has no such tool"


def text_of(content: Any, where: str, of_a_tool: bool = False) -> str:
    """Return the text of a content: null, a string, or an array of parts.

    Raises:
        InvalidRequestError: a part is neither text nor one of MEDIA, and not in a tool's result.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    require(isinstance(content, list), where, "must be a string or an array of parts")
    read = [part for part in objects(content, where) if not (of_a_tool and part[1].get("type") == REFERENCE)]
    return "\n".join(_part(part, place, of_a_tool) for place, part in read)


def _part(part: dict[str, Any], where: str, of_a_tool: bool) -> str:
    kind: Any = part.get("type")
    if kind == "input_json":  # of decisions
        return dumps(part.get("data")).decode()
    known = isinstance(kind, str) and kind in TEXT_PARTS
    if isinstance(kind, str) and not known and (of_a_tool or kind in MEDIA):
        return read_media(part)[0]
    require(known, f"{where}.type", f"only text can be read by this model, got {kind!r:.80}")
    return string_of(part, TEXT_PARTS[kind], where)


def string_of(value: Mapping[str, Any], name: str, where: str) -> str:
    """Return the string `name` of the object at the path `where`. Refuse others by an InvalidRequestError."""
    text = value.get(name)
    if not isinstance(text, str):
        raise refusal(f"{where}.{name}", "must be a string")
    return text


def function_of(tool: Any, where: str, parameters: str) -> dict[str, Any]:
    """Return another dialect's tool as OpenAI's function.

    Args:
        parameters: the dialect's name for the schema of the arguments.

    Raises:
        InvalidRequestError: `field` is the path of the value at fault.
    """
    schema, description = tool.get(parameters), tool.get("description")
    require(bool(string_of(tool, "name", where)), f"{where}.name", "must not be empty")
    require(schema is None or isinstance(schema, dict), f"{where}.{parameters}", "must be an object")
    require(description is None or isinstance(description, str), f"{where}.description", "must be a string")
    return {"name": tool["name"], "description": description or "", "parameters": schema or {"type": "object"}}


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    require(isinstance(calls, list), where, "must be an array")
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = _called(call, where)
    arguments = _arguments(function.get("arguments"))
    out: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        out["id"] = call["id"]
    return out


def _called(call: Any, where: str) -> dict[str, Any]:
    """Return what a call names and says; of a custom tool's, as of the function that the model has called."""
    if not (isinstance(call, dict) and call.get("type") == "custom"):
        return _function(call, where)
    custom: Any = call.get("custom")
    require(isinstance(custom, dict), f"{where}.custom", "must be an object")
    name, text = (string_of(custom, member, f"{where}.custom") for member in ("name", "input"))
    return {"name": name, "arguments": {"input": text}}


def _arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments as a mapping, over which templates iterate. Broken JSON is kept as text: it must not fail
    the session.
    """
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = loads(arguments)
        except ValueError:
            return {"arguments": arguments}
    if isinstance(arguments, dict):
        return arguments
    return {"arguments": arguments} if arguments else {}


def _tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the function tools. Other kinds are the provider's own (web search and the like) and are left out."""
    return [_tool(tool, where) for where, tool in objects(tools, "tools") if tool.get("type", "function") == "function"]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    function = _function(tool, where)
    require(bool(function["name"]), f"{where}.function.name", "must not be empty")
    flag = deferral_of(tool, where) | deferral_of(function, f"{where}.function")
    return {"type": "function", "function": without_flag(function) if FLAG in function else function, **flag}


def _function(value: Any, where: str) -> dict[str, Any]:
    """Return the function with a name of a tool or a call."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refusal(f"{where}.function.name", "must be a string")
    return function


def _system_first(messages: Sequence[Message]) -> list[Message]:
    """Join the system messages before the first answer in front."""
    opening = list(takewhile(lambda message: message["role"] != "assistant", messages))
    system = [message["content"] for message in opening if message["role"] in SYSTEM]
    rest = [message for message in opening if message["role"] not in SYSTEM] + list(messages[len(opening) :])
    first = {"role": "system", "content": "\n\n".join(filter(None, system))}
    return [first, *rest] if system else rest


@dataclass(slots=True)
class _Round:
    """A message with calls, and their results so far."""

    message: Message
    results: list[Message | None]
    strays: list[Message] = field(default_factory=list)  # results with no call's id

    def take(self, place: int, result: Message) -> None:
        call = self.message["tool_calls"][place]
        self.results[place] = result | {"tool_call_id": call["id"], "name": call["function"]["name"]}


Waiting = dict[tuple[str, str | None], list[tuple[_Round, int]]]  # calls by id, and by function too; the next one last


def _with_results(messages: Sequence[Message]) -> Iterator[Message]:
    """Put each result behind its call, in the order of the calls. One that answers no call stays where it is.

    The latest call with the result's id is its call, else the next one without a result of those just before it. A call
    of the function that the result names goes first.
    Beside other results a missing one is `NO_RESULT`: they keep their places.
    """
    out: list[Message | _Round] = []
    waiting: Waiting = {}
    latest: _Round | None = None  # behind it are only results and reminders
    for message in messages:
        if "tool_calls" in message:
            latest = _Round(_with_ids(message, len(out)), [None] * len(message["tool_calls"]))
            out.append(latest)
            for place, call in reversed(list(enumerate(latest.message["tool_calls"]))):
                for name in (call["function"]["name"], None):
                    waiting.setdefault((call["id"], name), []).append((latest, place))
        elif message["role"] == "tool" and _takes(waiting, message):
            continue
        elif message["role"] == "tool" and latest:
            latest.strays.append(message)
        else:
            out.append(message)
            latest = latest if reminds(message) else None
    for known in out:
        yield from _in_order(known) if isinstance(known, _Round) else (known,)


def _takes(waiting: Waiting, result: Message) -> bool:
    """Give the result to the call with its id that waits for it. Return whether there is one."""
    for name in (result.get("name"), None):
        calls = waiting.get((result.get("tool_call_id", ""), name), [])
        while calls:
            entry, place = calls.pop()
            if entry.results[place] is None:
                entry.take(place, result)
                return True
    return False


def _place_named(entry: _Round) -> list[Message]:
    """Give strays to calls of the functions that they name. Return those that find none."""
    named: dict[Any, list[int]] = {}  # calls without a result, by function, the next one last
    for place, call in reversed(list(enumerate(entry.message["tool_calls"]))):
        if entry.results[place] is None:
            named.setdefault(call["function"]["name"], []).append(place)
    unnamed = []
    for stray in entry.strays:
        if places := named.get(stray.get("name")):
            entry.take(places.pop(), stray)
        else:
            unnamed.append(stray)
    return unnamed


def _in_order(entry: _Round) -> Iterator[Message]:
    yield entry.message
    calls = entry.message["tool_calls"]
    strays = iter(_place_named(entry))
    free = (place for place, result in enumerate(entry.results) if result is None)
    for place, stray in zip(free, strays, strict=False):
        entry.take(place, stray)
    if any(entry.results):
        yield from (result or no_result(call) for call, result in zip(calls, entry.results, strict=True))
    yield from strays


def no_result(call: Mapping[str, Any]) -> Message:
    """Return the message in the place of a result that is missing."""
    return {"role": "tool", "content": NO_RESULT, "tool_call_id": call["id"], "name": call["function"]["name"]}


def _with_ids(message: Message, place: int) -> Message:
    """Give each call an id. Old clients and functions send none."""
    calls = [{**call, "id": call.get("id") or f"call_{place}_{i}"} for i, call in enumerate(message["tool_calls"])]
    return message | {"tool_calls": calls}


def _template_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if (name := refused_name(kwargs)) is not None:
        raise refusal("chat_template_kwargs", f"{name!r:.80} can't be set by a request")
    return dict(kwargs)
