"""Reminders: an agent's client speaks to the model in system messages behind the first, or in tags.

A reminder (of a plan, a changed file, the tokens that are left) asks nothing, and the text beside it takes it in. So
the user's message stays the one that asks, and a result the one that was read last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile

from .deferred import ASIDE, LOADS, Message

SYSTEM = ("system", "developer")
OPEN, CLOSE = ASIDE.split("\n{}\n")
_TAG = re.compile(f"{OPEN}|{CLOSE}")


def without_reminders(text: str) -> str:
    """Return the text without what stands between the tags, which may quote them. One that is never closed is text."""
    if OPEN not in text:
        return text
    parts, at = list[str](), 0
    for start, end in _tagged(text):
        if start >= at:
            parts.append(text[at:start])
            at = end
    return "".join(parts) + text[at:]


def _tagged(text: str) -> Iterable[tuple[int, int]]:
    """Return where each opening tag that is closed stands, and the end of its closing tag, in the text's order."""
    ends, closing, nearest = dict[int, int](), list[int](), 0
    for tag in reversed(list(_TAG.finditer(text))):
        if tag[0] == CLOSE:
            nearest = tag.end()
            closing.append(nearest)
        elif nearest:  # a quoted tag may have taken its own end
            ends[tag.start()] = closing.pop() if closing else nearest
    return reversed(ends.items())


def only_reminds(message: Message) -> bool:
    """Return whether a message in the user's name is not the user's: all of it stands between the tags."""
    return (
        message["role"] == "user" and OPEN in message["content"] and not without_reminders(message["content"]).strip()
    )


def place_reminders(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with system messages at the beginning only, and each reminder in the text beside it.

    It stands behind the result before it, else in front of the user's text, which a sparse prefill keeps as the last.
    Between answers it is a message of its own. Contents must be texts.
    """
    if not any(map(reminds, messages)):
        return list(messages)
    out: list[Message] = []
    waiting = ""  # reminders behind an answer
    for remind, group in groupby(messages, key=reminds):
        run = list(group)
        if not remind:
            out += _behind(waiting, run)
            waiting = ""
            continue
        if not out:
            out += takewhile(lambda message: message["role"] in SYSTEM, run)
            run = run[len(out) :]
        text = _text_of(run)
        if text and out and out[-1]["role"] in ("user", "tool"):
            last = out.pop()
            texts = (text, last["content"]) if last["role"] == "user" else (last["content"], text)
            out.append(last | {"content": _joined(texts)})
        else:
            waiting = text
    return out + _behind(waiting, [])


def reminds(message: Message) -> bool:
    """Return whether a message is a reminder, if it is not one of the system messages at the beginning."""
    return message["role"] in SYSTEM or only_reminds(message)


def _text_of(run: Sequence[Message]) -> str:
    """Return the reminders as one text, those of system messages within one pair of tags."""
    texts = []
    for by_role, group in groupby(run, key=lambda message: message["role"] in SYSTEM):
        text = _joined(message["content"] for message in group)
        if by_role and (text := text.replace(OPEN, "").replace(CLOSE, "").strip()):
            text = ASIDE.format(text)
        texts.append(text)
    return _joined(texts)


def _behind(reminders: str, run: list[Message]) -> list[Message]:
    """Return messages behind reminders. The user's text takes them in."""
    if not reminders:
        return run
    if run and run[0]["role"] == "user" and LOADS not in run[0]:
        return [run[0] | {"content": _joined((reminders, run[0]["content"]))}, *run[1:]]
    return [{"role": "user", "content": reminders}, *run]


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, texts))
