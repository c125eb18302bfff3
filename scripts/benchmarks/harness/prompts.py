"""Prompts that ask about a long text, as token ids."""

from __future__ import annotations

import random

from mlx_lm.tokenizer_utils import TokenizerWrapper
from training import tasks

from mlx_specprefill_evals import words
from mlx_specprefill_evals.corpus import modules, paragraphs
from mlx_specprefill_evals.facts import Fact, needle, six_digits
from mlx_specprefill_evals.haystack import FILLERS, document

__all__ = ["codes_prompt", "edit_prompt", "needle_prompt", "passage_prompt", "quote_prompt", "real_text"]


def needle_prompt(tokenizer: TokenizerWrapper, seed: int, length: int, depth: float) -> tuple[int, ...]:
    """At most `length` tokens, the fact at `depth` (0 to 1) of the text; names and words that no training used."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    sample = tasks.needle_sample(seed, length, depth, count)
    return tuple(tokenizer.apply_chat_template(sample.messages()[:-1], add_generation_prompt=True))


def codes_prompt(
    tokenizer: TokenizerWrapper, seed: int, length: int, depth: float, codes: int
) -> tuple[tuple[int, ...], str]:
    """A needle whose value is so many six-digit codes, and that value.

    The answer is begun up to the value (RULER's prefix), so all of what follows can only be known from the needle.
    """

    def encoded(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    rng = random.Random(f"codes/{seed}/{length}/{depth}/{codes}")
    value = " ".join(six_digits(rng) for _ in range(codes))
    fact: Fact = needle(words.person(rng, held_out=True), value)
    budget = length - len(encoded(fact.turn.question)) - len(encoded(fact.turn.answer)) - 16
    kinds = rng.sample(sorted(FILLERS), rng.choice((1, 2)))
    text = document(rng, fact.pieces, kinds, budget, lambda part: len(encoded(part)), depths=[depth], held_out=True)
    messages = [{"role": "user", "content": f"{text}\n\n{fact.turn.question}"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return (*prompt, *encoded(fact.turn.answer.partition(value)[0].rstrip())), value


def passage_prompt(tokenizer: TokenizerWrapper, seed: int, length: int) -> tuple[int, ...]:
    """About `length` tokens of the standard library's documentation, to be explained."""
    text = "\n\n".join(_passage(tokenizer, seed, length))
    messages = [{"role": "user", "content": f"{text}\n\nExplain what this text says, with its own words."}]
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def quote_prompt(tokenizer: TokenizerWrapper, seed: int, length: int) -> tuple[int, ...]:
    """The same passage, one paragraph of which is to be quoted; the quotation is begun."""
    parts = _passage(tokenizer, seed, length)
    chosen = max(parts[: max(1, len(parts) // 2)], key=len)
    words = chosen.split()
    asked = f"Quote the paragraph that begins with {' '.join(words[:5])!r}, word for word."
    messages = [{"role": "user", "content": "\n\n".join(parts) + "\n\n" + asked}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return (*prompt, *tokenizer.encode(" ".join(words[:8]), add_special_tokens=False))


def real_text(tokenizer: TokenizerWrapper, seed: int, length: int) -> list[int]:
    """So many tokens of a passage, without any question."""
    text = "\n\n".join(_passage(tokenizer, seed, length + 1))
    return list(tokenizer.encode(text, add_special_tokens=False))[:length]


def _passage(tokenizer: TokenizerWrapper, seed: int, length: int) -> list[str]:
    """Paragraphs that follow each other, of about so many tokens."""
    pages = paragraphs()
    at = random.Random(f"passage/{seed}").randrange(len(pages))
    parts: list[str] = []
    tokens = 0
    while tokens < length:
        parts.append(pages[at % len(pages)].text)
        tokens += len(tokenizer.encode(parts[-1], add_special_tokens=False))
        at += 1
    return parts


def edit_prompt(tokenizer: TokenizerWrapper, seed: int, length: int) -> tuple[int, ...]:
    """About `length` tokens of a module of the standard library, whose first lines are to be written with an edit."""
    rng, lines = random.Random(f"edit/{seed}"), list[str]()
    while sum(map(len, lines)) < 6 * length:  # characters: more than enough
        lines = rng.choice(modules()).source.splitlines(keepends=True)
    start = rng.randrange(len(lines) // 2)
    code, tokens = "", 0
    for line in lines[start:]:
        code, tokens = code + line, tokens + len(tokenizer.encode(line, add_special_tokens=False))
        if tokens >= length:
            break
    asked = "Write the first 24 lines of this code again, with one more line at the beginning: `# edited`."
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"```python\n{code}```\n\n{asked}"}], add_generation_prompt=True
    )
    return (*prompt, *tokenizer.encode("```python\n# edited\n", add_special_tokens=False))
