"""Messages for probes of chat templates: each text, argument and result is a mark that can be found in a rendering."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .conversation import Message

Talk = list[Message]

NAME, OTHER = "zqname", "zqothr"
SHORT, LONG, TINY = ("zqid1zqid", "zqid2zqid"), ("call_zq_0123456789_1", "call_zq_0123456789_2"), ("zq1", "zq2")


def system() -> Message:
    return {"role": "system", "content": "zqsys"}


def user(mark: str) -> Message:
    return {"role": "user", "content": mark}


def answer(mark: str, thought: str = "") -> Message:
    return {"role": "assistant", "content": mark, **_thinking(thought)}


def _thinking(thought: str) -> Message:
    return {"reasoning_content": thought, "reasoning": thought} if thought else {}


def calls(*marks: str, text: str = "", ids: Sequence[str] = SHORT, thought: str = "") -> Message:
    made = [
        {"type": "function", "id": identity, "function": {"name": name, "arguments": {"zqkey": mark}}}
        for mark, identity, name in zip(marks, ids, (NAME, OTHER), strict=False)
    ]
    return {"role": "assistant", "content": text, "tool_calls": made, **_thinking(thought)}


def result(mark: str, identity: str = SHORT[0], name: str = NAME) -> Message:
    return {"role": "tool", "content": mark, "tool_call_id": identity, "name": name}


def marks(talk: Talk) -> Iterator[str]:
    """Yield the marks in the order in which they should be read. The system's place is the template's choice."""
    for message in talk:
        if message["role"] != "system":
            yield message["content"]
        for call in message.get("tool_calls", ()):
            yield call["function"]["arguments"]["zqkey"]
