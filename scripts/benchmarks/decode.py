"""Drafted answers to real text through the engine, against plain decoding behind the same prompt.

    quote   a paragraph of the standard library's documentation, word for word
    edit    the first lines of a module of the standard library, with one more line
    free    a passage of the documentation, to be explained

Every strategy that the pair can run answers each prompt, greedily, and all take turns. `vs_off` is the median over the
prompts of tokens per second over those of plain decoding, with the ends of its 95 % interval (it takes six prompts of a
task). `engaged` counts the prompts for which a strategy ran, `different` the answers that plain decoding does not give:
then the exit status is 1. `--pair smollm2 -n 20` measures a real model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    ModelPair,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    SpeculationConfig,
    SpeculationName,
    SpeculationReport,
    TokenEvent,
)
from mlx_specprefill.speculative.strategies import STRATEGIES, refusals
from mlx_specprefill_evals.corpus import modules, paragraphs

from .harness import BenchError, pairs
from .harness.figures import median_interval, rounded, show_rows

QUICK: dict[str, Any] = {"n": 3, "length": 256, "tokens": 8}
WARM_UP = 8  # tokens of the first answers, in which what is measured once is measured

Row = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """An answer and the milliseconds per token after its first one."""

    tokens: tuple[int, ...]
    ms: float
    drafted: SpeculationReport | None

    @property
    def speculated(self) -> bool:
        return self.drafted is not None and self.drafted.strategy != "autoregressive"


# --- prompts ---------------------------------------------------------------------------------------------------------


def passage(tokenizer: TokenizerWrapper, seed: int, length: int) -> list[str]:
    """Return consecutive paragraphs of about `length` tokens."""
    pages = paragraphs()
    at = random.Random(f"passage/{seed}").randrange(len(pages))
    parts: list[str] = []
    tokens = 0
    while tokens < length:
        parts.append(pages[at % len(pages)].text)
        tokens += len(tokenizer.encode(parts[-1], add_special_tokens=False))
        at += 1
    return parts


def prompt_of(tokenizer: TokenizerWrapper, text: str, begun: str = "") -> tuple[int, ...]:
    """Return the token ids of a user's message, with the answer begun."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return (*prompt, *tokenizer.encode(begun, add_special_tokens=False))


def free_prompt(tokenizer: TokenizerWrapper, seed: int, length: int) -> tuple[int, ...]:
    text = "\n\n".join(passage(tokenizer, seed, length))
    return prompt_of(tokenizer, f"{text}\n\nExplain what this text says, with its own words.")


def quote_prompt(tokenizer: TokenizerWrapper, seed: int, length: int) -> tuple[int, ...]:
    parts = passage(tokenizer, seed, length)
    words = max(parts[: max(1, len(parts) // 2)], key=len).split()
    asked = f"Quote the paragraph that begins with {' '.join(words[:5])!r}, word for word."
    return prompt_of(tokenizer, "\n\n".join([*parts, asked]), " ".join(words[:8]))


def edit_prompt(tokenizer: TokenizerWrapper, seed: int, length: int) -> tuple[int, ...]:
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
    return prompt_of(tokenizer, f"```python\n{code}```\n\n{asked}", "```python\n# edited\n")


TASKS: dict[str, Callable[[TokenizerWrapper, int, int], tuple[int, ...]]] = {
    "quote": quote_prompt,
    "edit": edit_prompt,
    "free": free_prompt,
}

# --- answers ---------------------------------------------------------------------------------------------------------


def answers_of(
    pair: ModelPair, arms: Sequence[SpeculationName], options: argparse.Namespace
) -> dict[tuple[str, str], list[Answer]]:
    """Return the answers by task and arm; prompts are of each task in turn."""
    answers: dict[tuple[str, str], list[Answer]] = {}
    policy, speculation = SpecPrefillPolicy(densify=False), SpeculationConfig(budget=options.budget)
    with Engine(pair, EngineConfig(speculation=speculation, policy=policy)) as engine:
        for number in range(options.n):
            task = list(TASKS)[number % len(TASKS)]
            prompt = TASKS[task](pair.tokenizer, 7000 + number, options.length)
            for arm in arms:  # the prompt is read once, by the draft too
                answered(engine, prompt, arm, 1 if number else WARM_UP, options.sparse)
            for arm in arms if number % 2 else arms[::-1]:
                answer = answered(engine, prompt, arm, options.tokens, options.sparse)
                answers.setdefault((task, arm), []).append(answer)
    return answers


def answered(engine: Engine, prompt: tuple[int, ...], arm: SpeculationName, count: int, sparse: bool) -> Answer:
    asked = SpecPrefillOptions(enabled=sparse, speculative=arm)
    tokens, times = [], []
    for event in engine.generate(GenerationRequest(prompt, count, specprefill=asked)):
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
            times.append(time.perf_counter())
        elif isinstance(event, Finished):
            ms = 1e3 * (times[-1] - times[0]) / max(1, len(times) - 1)
            return Answer(tuple(tokens), ms, event.account.speculation)
    raise BenchError("a request failed")


def summary(task: str, arm: str, answers: dict[tuple[str, str], list[Answer]]) -> Row:
    ours, off = answers[task, arm], answers[task, "off"]
    both = [(one, other) for one, other in zip(ours, off, strict=True) if len(one.tokens) > 1]
    ratios = [other.ms / one.ms for one, other in both]
    low, high = median_interval(ratios)
    reports = [one.drafted for one in ours if one.drafted is not None and one.speculated]
    rates = [one.acceptance_rate for one in reports if one.acceptance_rate is not None]
    steps = [one.tokens_per_step for one in reports if one.tokens_per_step is not None]
    return {
        "task": task,
        "arm": arm,
        "n": len(ours),
        "ms_per_token": statistics.median(one.ms for one in ours),
        "vs_off": statistics.median(ratios) if ratios else None,
        "low": low,
        "high": high,
        "acceptance": statistics.mean(rates) if rates else None,
        "tokens_per_step": statistics.mean(steps) if steps else None,
        "engaged": sum(one.speculated for one in ours),
        "different": sum(one.tokens != other.tokens for one, other in zip(ours, off, strict=True)),
    }


# --- start -----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arms", nargs="+", choices=list(STRATEGIES), help="default: all that the pair can run")
    parser.add_argument("-n", type=int, default=12, help="prompts, a third of each task")
    parser.add_argument("--length", type=int, default=700, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--budget", type=int, default=256, help="tokens of a retrieved cache")
    parser.add_argument("--sparse", action="store_true", help="answers follow a sparse prefill")


def run(options: argparse.Namespace) -> dict[str, Any]:
    if min(options.n, options.tokens) < 1 or options.length < 64:
        raise BenchError("-n and --tokens must be at least 1, --length at least 64 tokens")
    pair = pairs.loaded(options)
    refused = refusals(pair.target, pair.proposer, pair.mtp)
    able: list[SpeculationName] = [name for name, reason in refused.items() if reason is None]
    for name in options.arms or ():
        if refused[name] is not None:
            raise BenchError(f"{name}: {refused[name]}")
    arms: list[SpeculationName] = ["off", *(options.arms or able)]
    answers = answers_of(pair, arms, options)
    rows = rounded([summary(task, arm, answers) for task in TASKS for arm in arms if (task, arm) in answers])
    show_rows(rows)
    worst = {
        f"{arm}_vs_off": min((row["vs_off"] for row in rows if row["arm"] == arm and row["vs_off"]), default=None)
        for arm in arms[1:]
    }
    return {"benchmark": "decode", **worst, "different": sum(row["different"] for row in rows), "rows": rows}
