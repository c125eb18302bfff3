"""Makes prompts that ask, in six languages and in the forms in which people and apps write: what a probe learns from.

The orders, forms and short texts are ours (`asking.json`). Other texts are docstrings and code of the standard library.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from .texts import docstrings, sources

_LINES = 8, 16  # of a document
_CHARACTERS = 1000  # of a document at most: some 250 tokens
_OTHERS = 3  # every third text is not of the order's language; of English ones it is


@dataclass(frozen=True)
class AskingPrompt:
    """Messages, one of which holds an order or a question about a text.

    Attributes:
        messages: as a chat template takes them.
        order: stands in one of them once.
        language: of the order.
    """

    messages: tuple[dict[str, str], ...]
    order: str
    language: str


def asking_prompts(
    data: Mapping[str, Any] | None = None, seed: int = 0, others: Sequence[str] = ()
) -> Iterator[AskingPrompt]:
    """Yield a prompt for each order, with forms and kinds of texts in turns. Same Python, same prompts.

    Args:
        data: other orders, texts and forms, as in `asking.json`.
        others: texts in place of the standard library's.
    """
    data = _data() if data is None else data
    rng, forms = random.Random(f"asking/{seed}"), list(data["forms"])
    orders = [(language, order) for language, said in data["orders"].items() for order in said]
    rng.shuffle(orders)
    for number, (language, order) in enumerate(orders):
        if number % len(forms) == 0:
            rng.shuffle(forms)
        asked = order.rstrip("?？") if rng.random() < 1 / 3 else order
        yield _filled(
            forms[number % len(forms)], asked, language, _document(rng, data["passages"], language, number, others)
        )


@cache
def _data() -> Any:
    return json.loads(Path(__file__).with_name("asking.json").read_text(encoding="utf-8"))


def _filled(form: Sequence[str], order: str, language: str, lines: Sequence[str]) -> AskingPrompt:
    """Return a form's messages: the system's text, "" for none, then the user's and the assistant's in turn."""
    half = len(lines) // 2
    parts = {"first": lines[:half], "second": lines[half:], "document": lines}
    values = {name: "\n".join(part) for name, part in parts.items()}
    said = [Template(text).substitute(values, order=order) for text in form]
    roles = ["system", *("user", "assistant") * len(form)]
    messages = tuple({"role": role, "content": text} for role, text in zip(roles, said, strict=False) if text)
    return AskingPrompt(messages, order, language)


def _document(
    rng: random.Random, texts: Mapping[str, list[str]], language: str, number: int, others: Sequence[str]
) -> list[str]:
    """Return a text's lines: of the language, or of other texts."""
    own = texts.get(language, [])
    if own and (number % _OTHERS > 0) == (language != "en"):
        sentences = rng.sample(own, len(own))
        joined = 1 if rng.random() < 1 / 2 else 3  # sentences in a line
        lines = [" ".join(sentences[at : at + joined]) for at in range(0, len(own), joined)]
    else:
        standard = docstrings() if rng.random() < 1 / 2 else sources()
        text = rng.choice(others or standard or ["\n".join(passages) for passages in texts.values()])
        whole = text.splitlines()
        start = rng.randrange(max(1, len(whole) - _LINES[1]))
        lines = whole[start : start + rng.randint(*_LINES)]
    size, taken = 0, list[str]()
    for line in lines:
        size += len(line)
        if size > _CHARACTERS:
            break
        taken.append(line)
    return taken or [lines[0][:_CHARACTERS]]
