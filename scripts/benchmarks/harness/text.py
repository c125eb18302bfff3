"""Filler, facts, and the messages of a conversation."""

from __future__ import annotations

import random
import zlib

from .servers import Reply, Server

WORDS = """river stone market winter letter garden window bridge captain morning silver forest teacher engine harbor
village paper cotton ladder mirror pocket summer tunnel valley writer yellow basket candle doctor eagle""".split()


class Text:
    """Filler of about so many tokens: all words alike often, in random order, so that texts of a length cost the same.

    No two texts begin the same way.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._per_token = 1.0

    def calibrate(self, server: Server) -> None:
        """Measure the words per token of this pair's tokenizer."""
        self._per_token = 1.0
        reply = server.ask(user(self.of(400)), 1)
        self._per_token = 400 / reply.prompt_tokens

    def fresh(self, *key: object) -> Text:
        """Return a generator of other filler with the same words per token. A key always gives the same one."""
        other = Text(zlib.crc32(repr(key).encode()))
        other._per_token = self._per_token
        return other

    def of(self, tokens: int) -> str:
        count = max(1, int(tokens * self._per_token))
        words = [word for _ in range(-(-count // len(WORDS))) for word in self._rng.sample(WORDS, len(WORDS))]
        return " ".join(words[:count]) + "."


def secret(name: str, code: str) -> str:
    """Return a fact that the bundled pairs were trained to look up."""
    return f"The secret code for {name} is {code}."


def question(name: str) -> str:
    return f"What is the secret code for {name}?"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def following(messages: list[dict[str, str]], reply: Reply, text: str) -> list[dict[str, str]]:
    return [*messages, {"role": "assistant", "content": reply.text}, {"role": "user", "content": text}]
