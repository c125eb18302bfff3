"""One long session on the scripted model: every token that was cached is counted, whether it is read again or not.

The server is started anew in the middle. Behind the last turn the session is compacted, and goes on with the summary.
Then sub-agents begin at once behind one system prompt that nobody has read before.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from .servers import Copies, Reply, Server, together
from .text import Text, user

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.scripted import save_scripted

COMPACT = "Your task is to create a detailed summary of the conversation so far."
TAIL = 64  # tokens: an answer and the template around it, which the next turn may have to read again
ANSWER = 16  # tokens at most


class Soak:
    """The requests of a session and what they read.

    Attributes:
        refused: requests without an answer; `requests`: all of them.
        prompts, cached, again: tokens of all prompts, those that were cached, and those read although they had been.
    """

    def __init__(self, text: Text) -> None:
        self.requests = self.prompts = self.cached = self.again = self.known = 0
        self.worst = 0.0  # share of a prompt that was read, but for those that nobody knew
        self._text = text

    def ask(self, server: Server, messages: list[dict[str, Any]], known: int) -> Reply:
        """Send a prompt of which so many tokens were in an earlier one, and note what was read."""
        reply = server.ask(messages, ANSWER)
        self.requests += 1
        self.prompts += reply.prompt_tokens
        self.cached += reply.cached_tokens
        self.again += max(0, known - TAIL - reply.cached_tokens)
        self.known = reply.prompt_tokens + reply.completion_tokens
        if known:
            self.worst = max(self.worst, 1 - reply.cached_tokens / reply.prompt_tokens)
        return reply

    def play(self, server: Server, talk: list[dict[str, Any]], turns: int, tokens: int) -> None:
        """Add turns to the session, each with a new text of so many tokens."""
        for _ in range(turns):
            talk.append({"role": "user", "content": self._text.of(tokens)})
            reply = self.ask(server, talk, self.known)
            talk.append({"role": "assistant", "content": reply.text})


def soak(start_s: float, turns: int, tokens: int, agents: int, prefix: int) -> dict[str, Any]:
    """Return the counts of a session that grows to `tokens` tokens, and of sub-agents behind a prefix."""
    with tempfile.TemporaryDirectory() as name:
        model = save_scripted(Path(name, "model"))
        copies = Copies(model, model, Path(name), start_s, exact=False)
        start: Callable[[], AbstractContextManager[Server]] = lambda: copies.ours(  # noqa: E731
            "--no-specprefill", "--prefix-cache-dir", str(Path(name, "prefixes"))
        )
        text = Text(1)
        with start() as server:
            text.calibrate(server)
            run, system = Soak(text), {"role": "system", "content": text.of(2000)}
            talk: list[dict[str, Any]] = [system]
            run.play(server, talk, turns // 2, tokens // turns)
            server.rest()
        with start() as server:
            run.play(server, talk, turns - turns // 2, tokens // turns)
            longest = run.known
            summary = run.ask(server, [*talk, *user(COMPACT)], run.known)
            run.known = server.count([system], [])
            run.play(server, [system, *user(f"Summary: {summary.text}")], 1, 100)
            before = run.prompts - run.cached
            common = {"role": "system", "content": text.fresh("storm").of(prefix)}
            tasks = [[common, *user(text.of(100))] for _ in range(agents)]
            together(lambda task: run.ask(server, task, 0), tasks)
            storm = run.prompts - run.cached - before
            errors = server.errors()
    return {
        "turns": turns,
        "longest_prompt": longest,
        "requests": run.requests,
        "cached": run.cached / run.prompts,
        "read_again": run.again,
        "worst": run.worst,
        "storm_read": storm,
        "errors": errors,
    }
