"""The form in which one chat template shows a conversation (roles, their order, calls, ids), and messages in that form.

Templates differ in what they take: some show no calls, one call a message, no text beside a call, or only conversations
in which people and the assistant alternate. `probe` asks a template and chooses its form. Everything here is a pure
function of the messages, so that a conversation that goes on keeps its beginning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import Any, Literal

from ..notations import NOTATIONS
from ..notations.mistral import SHORT_ID
from .conversation import Message, no_result

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
OWN_ID = re.compile(f"call_[0-9a-f]{{15}}({SHORT_ID.pattern})")  # of this server; its end may be the model's
NAMING_ID = re.compile(r"functions\..+:[0-9]+")
PLAIN = {"role", "content", "name"}  # members of messages that can be joined


@dataclass(frozen=True, slots=True)
class Form:
    """The choices that suit one template.

    Attributes:
        shows_tools: tools are shown.
        system: "user": the system message is the beginning of the first user's message.
        no_tools: an empty list stands for no tools.
        fills_tools: tools without a description or parameters get empty ones, and types are single words.
        calls: arguments as a "mapping" or as JSON "text"; "written": calls are text.
        notation: of written calls, by name; "": JSON in a user's message, since the model was trained on none.
        null: content is null beside calls.
        parallel: a message may have several calls.
        beside: text beside calls is "kept", "joined" with the reasoning before it, or "apart" in a message before.
        beside_earlier: the same before the assistant's last message without calls.
        ids: of calls: the client's "own", nine letters or digits ("short"), or naming the function, counted over the
            conversation ("naming") or within a message ("naming each").
        results: "user": results are written in user's messages.
        orphans: results of no call are shown.
        unanswered: calls without results are taken before other messages.
        empty: an empty answer is taken.
        only_thought: an answer that is a thought alone is taken.
        opens: the first message has to be a user's.
        asks: there has to be a user's message.
        alternates: people and the assistant alternate, without regard to calls and results.
        kwargs: the template's arguments where a conversation sets none: those that keep the thoughts of finished turns.
    """

    shows_tools: bool = True
    system: Literal["system", "user"] = "system"
    no_tools: bool = False
    fills_tools: bool = False
    calls: Literal["mapping", "text", "written"] = "mapping"
    notation: str = ""
    null: bool = False
    parallel: bool = True
    beside: Literal["kept", "joined", "apart"] = "kept"
    beside_earlier: Literal["kept", "joined", "apart"] = "kept"
    ids: Literal["own", "short", "naming", "naming each"] = "own"
    results: Literal["tool", "user"] = "tool"
    orphans: bool = True
    unanswered: bool = True
    empty: bool = True
    only_thought: bool = True
    opens: bool = False
    asks: bool = False
    alternates: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def messages_in(form: Form, messages: Sequence[Message]) -> list[Message]:
    """Return canonical messages in the form."""
    out = _in_rounds(form, messages)
    if form.system == "user":
        out = _system_to_user(out)
    out = [message for message in out if message["role"] != "assistant" or _is_taken(form, message)] or [_user("")]
    if form.alternates:
        out = _alternating(form, out)
    opening = next((i for i, message in enumerate(out) if message["role"] != "system"), len(out))
    asking = out[opening : opening + 1] if form.opens else out
    if (form.opens or form.asks) and all(message["role"] != "user" for message in asking):
        out.insert(opening, _user(""))
    return out


def tools_in(form: Form, tools: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """Return the tools in the form."""
    if not tools:
        return [] if form.no_tools else None
    return [_filled(tool) for tool in tools] if form.fills_tools else [dict(tool) for tool in tools]


def _is_taken(form: Form, message: Message) -> bool:
    if message["content"] or "tool_calls" in message:
        return True
    return form.only_thought if "reasoning" in message else form.empty


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


# --- Calls and results ------------------------------------------------------------------------------------------------


def _in_rounds(form: Form, messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each round of calls and results in its form."""
    final = max((i for i, m in enumerate(messages) if m["role"] == "assistant" and "tool_calls" not in m), default=-1)
    out: list[Message] = []
    at = calls = 0  # the number of the next call
    known: set[str] = set()
    while at < len(messages):
        message = messages[at]
        if "tool_calls" in message:
            results = _results_of(message, messages[at + 1 : at + 1 + len(message["tool_calls"])])
            after = at + 1 + len(results)
            if not (results or form.unanswered or after == len(messages)):
                results = [no_result(call) for call in message["tool_calls"]]
            where = form.beside_earlier if at < final else form.beside
            ids, calls = _ids(form, message, calls, known)
            out += _round(form, _beside(where, message), ids, results)
            at = after
        else:
            out.append(_orphan(form, message, calls) if message["role"] == "tool" else message)
            at += 1
    return out


def _results_of(message: Message, following: Sequence[Message]) -> list[Message]:
    """Return the following messages, if they are the results of the message's calls."""
    ids = [call["id"] for call in message["tool_calls"]]
    return list(following) if [result.get("tool_call_id") for result in following] == ids else []


def _orphan(form: Form, result: Message, calls: int) -> Message:
    if not form.orphans:
        return _user(_written_result(result))
    return _result(form, result, _id(form, result.get("tool_call_id", ""), "unknown", 0, calls))


def _beside(where: str, message: Message) -> list[Message]:
    """Return the message with calls, which is the last one, in the form for text beside them."""
    if not message["content"].strip() or where == "kept":
        return [message]
    if where == "joined":
        joined = "\n\n".join(filter(None, (message.get("reasoning"), message["content"])))
        rest = {name: value for name, value in message.items() if not name.startswith("reasoning")}
        return [rest | {"content": joined}]
    return [{"role": "assistant", "content": message["content"]}, message | {"content": ""}]


def _round(form: Form, said: Sequence[Message], ids: Sequence[str], results: Sequence[Message]) -> Iterator[Message]:
    """Yield what was said, the last of it with calls, and the results."""
    yield from said[:-1]
    message = said[-1]
    calls = [call | {"id": name} for call, name in zip(message["tool_calls"], ids, strict=True)]
    answers = [_result(form, result, name) for result, name in zip(results, ids, strict=False)]
    if form.calls == "written":
        yield from (*_written(form.notation, message, calls), *answers)
        return
    calls = [call | {"function": call["function"] | {"arguments": _arguments(form, call)}} for call in calls]
    if form.null and not message["content"]:
        message = message | {"content": None}
    if form.parallel:
        yield from (message | {"tool_calls": calls}, *answers)
        return
    bare = {"role": "assistant", "content": None if form.null else ""}
    for i, call in enumerate(calls):
        yield from ((bare if i else message) | {"tool_calls": [call]}, *answers[i : i + 1])


def _arguments(form: Form, call: Mapping[str, Any]) -> Any:
    arguments = call["function"]["arguments"]
    return json.dumps(arguments, ensure_ascii=False) if form.calls == "text" else arguments


def _result(form: Form, result: Message, name: str) -> Message:
    if form.results == "user":
        return _user(_written_result(result))
    return result | {"tool_call_id": name}


def _ids(form: Form, message: Message, number: int, known: set[str]) -> tuple[list[str], int]:
    """Return the ids of a message's calls, the first of which has the number, and the number of the call behind them.

    Templates may look for a call by its result's id, so an id that is `known` already gets the next free number.

    Args:
        known: ids of the calls before; those of the message are added.
    """
    out = []
    for i, call in enumerate(message["tool_calls"]):
        name = call["function"]["name"]
        made = _id(form, call["id"], name, i, number)
        while made in known and form.ids != "naming each":
            made = _id(form, f"{call['id']}-{number}", name, i, number)
            number += made in known
        known.add(made)
        out.append(made)
        number += 1
    return out, number


def _id(form: Form, given: str, name: str, in_message: int, in_conversation: int) -> str:
    """Return the id of a call to the function `name`, which has these numbers."""
    if form.ids == "own":
        return given
    if form.ids == "short":
        own = OWN_ID.fullmatch(given)
        return own[1] if own else given if SHORT_ID.fullmatch(given) else _digest(given)
    if form.ids == "naming each":
        return f"functions.{name}:{in_message}"
    return given if NAMING_ID.fullmatch(given) else f"functions.{name}:{in_conversation}"


def _digest(given: str) -> str:
    number = int.from_bytes(blake2b(given.encode(), digest_size=8).digest())
    return "".join(ALPHABET[number // len(ALPHABET) ** i % len(ALPHABET)] for i in range(9))


# --- Calls and results as text ----------------------------------------------------------------------------------------


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _written(notation: str, message: Message, calls: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    """Yield the message with its calls as text: in the answer, or in a user's message behind it."""
    written = [{"name": c["function"]["name"], "arguments": c["function"]["arguments"]} for c in calls]
    said = {name: value for name, value in message.items() if name != "tool_calls"}
    if notation and (write := NOTATIONS[notation].history):
        yield said | {"content": "\n".join(filter(None, (said["content"], write(written))))}
        return
    if said["content"] or "reasoning" in said:
        yield said
    yield _user("\n".join(map(_json, written)))


def _written_result(result: Message) -> str:
    named = {"name": result["name"]} if "name" in result else {}
    return _json(named | {"result": result["content"]})


# --- Turns ------------------------------------------------------------------------------------------------------------


def _system_to_user(messages: list[Message]) -> list[Message]:
    """Put the system message before the first user's text."""
    if messages[0]["role"] != "system":
        return messages
    first, rest = messages[0], messages[1:]
    if not rest or rest[0]["role"] != "user":
        return [_user(first["content"]), *rest]
    return [_join(rest[0], first["content"], rest[0]["content"]), *rest[1:]]


def _join(message: Message, *texts: str) -> Message:
    return message | {"content": "\n\n".join(filter(None, texts))}


def _alternating(form: Form, messages: Sequence[Message]) -> list[Message]:
    """Join neighbours of one role, and put an empty message of the other role where two still meet.

    Where the template takes no empty answer, a user's text becomes the end of the result before it.
    """
    out = [message for group in _neighbours(messages) for message in group]
    turns: list[Message] = []
    last = "assistant"  # the role of the last message that counts
    for message in out:
        if message["role"] in ("user", "assistant") and "tool_calls" not in message:
            if message["role"] == last == "user" and not form.empty and turns[-1]["role"] == "tool":
                turns[-1] = _join(turns[-1], turns[-1]["content"], message["content"])
                continue
            if message["role"] == last:
                turns.append({"role": "assistant" if last == "user" else "user", "content": ""})
            last = message["role"]
        turns.append(message)
    return turns


def _neighbours(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield runs of one role, joined into one message unless that would tear calls or results apart."""
    for can_join, run in groupby(messages, key=lambda m: m["role"] if PLAIN.issuperset(m) else None):
        group = list(run)
        yield [_join(group[0], *(m["content"] for m in group))] if can_join in ("user", "assistant") else group


# --- Tools ------------------------------------------------------------------------------------------------------------


def _filled(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    parameters = _whole_schema({**(function.get("parameters") or {}), "type": "object"})
    whole = {"required": [], **parameters, "properties": parameters.get("properties") or {}}
    return {**tool, "function": {**function, "description": function.get("description") or "", "parameters": whole}}


def _whole_schema(schema: Any) -> Any:
    """Return the schema with the members that templates read, and a single word as the type.

    `null` alone is none: templates know no such type.
    """
    if isinstance(schema, list):
        return [_whole_schema(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    out = {name: _whole_schema(value) for name, value in schema.items()}
    if isinstance(named := out.get("properties"), dict):
        out["properties"] = {n: {"description": "", **v} if isinstance(v, dict) else v for n, v in named.items()}
    words = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type")
    if not isinstance(words, list):
        return out
    known = [word for word in words if word != "null"]
    open_ended = {"additionalProperties": True} if known[:1] == ["object"] else {}
    rest = {name: value for name, value in out.items() if name != "type"}
    return {**({"type": known[0]} if known else {}), **open_ended, **rest}
