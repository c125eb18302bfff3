"""Speculative decoding of real text through the engine, against plain decoding after the same prompt.

    quote   a paragraph of the standard library's documentation, word for word
    edit    the first lines of a module of the standard library, with one more line
    code    lines of a module, to be explained
    chat    a conversation of such paragraphs, and a question that goes on
    free    a passage of the documentation, to be explained

Every strategy that the pair can run answers each prompt after each kind of prefill, greedily, and all take turns.
`vs_off` is the median over the prompts of tokens per second over those of plain decoding, with the ends of its 95 %
interval (it takes six prompts of a task), and `mean` their mean. `cpu_vs_off` is the median by the process's own time,
which counts on a busy machine. `cost_vs_off` and `cost_mean` count forwards instead of time: each row after the first
costs a quarter of a forward, the worst that is known of Apple's GPUs (eight rows take 2.7 times one). `engaged` counts
the prompts for which a strategy ran, `different` the answers that plain decoding does not give: then the exit status
is 1. `--pair smollm2 -n 40 --arms ngram` measures a real model.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    ModelPair,
    Progress,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    SpeculationConfig,
    SpeculationName,
    SpeculationReport,
    TokenEvent,
    as_token_ids,
)
from mlx_specprefill.engine.requests.drafting import models_of
from mlx_specprefill.speculative.rollback import Rollback
from mlx_specprefill.speculative.strategies import STRATEGIES, refusal
from mlx_specprefill_evals.corpus import modules, paragraphs
from mlx_specprefill_server.settings.server import Settings

from .harness import BenchError, pairs
from .harness.figures import Clock, median_interval, rounded, show_rows

QUICK: dict[str, Any] = {"n": 5, "length": 256, "tokens": 8}
WARM_UP = 8  # tokens of the first answers, in which what is tried out once is tried out
PREFILLS = ("full", "sparse")
ALL = "all"  # tasks together
ROW_COST = 0.25  # of a forward, for each further row of it

Row = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """An answer, with its cost from the end of the prefill to its last token.

    Attributes:
        ms, cpu_ms: per token.
        rows: of each forward of a drafted row; none of plain ones.
    """

    tokens: tuple[int, ...]
    ms: float
    cpu_ms: float
    rows: tuple[int, ...]
    drafted: SpeculationReport | None

    @property
    def speculated(self) -> bool:
        return self.drafted is not None and self.drafted.strategy != "autoregressive"

    @property
    def cost(self) -> float:
        """Return the cost per token in forwards of one row."""
        return sum(1 + ROW_COST * (rows - 1) for rows in self.rows) / len(self.tokens) if self.rows else 1.0


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


def chat_prompt(tokenizer: TokenizerWrapper, seed: int, length: int) -> tuple[int, ...]:
    parts = passage(tokenizer, seed, length)
    turns = [*parts, *(["I see."] if len(parts) % 2 else []), "Thank you. What would you try first now, and why?"]
    messages = [{"role": "assistant" if turn % 2 else "user", "content": text} for turn, text in enumerate(turns)]
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def code_prompt(tokenizer: TokenizerWrapper, seed: int, length: int) -> tuple[int, ...]:
    asked = "Explain what this code does, step by step."
    return prompt_of(tokenizer, f"```python\n{code(tokenizer, seed, length)}```\n\n{asked}")


def edit_prompt(tokenizer: TokenizerWrapper, seed: int, length: int) -> tuple[int, ...]:
    asked = "Write the first 24 lines of this code again, with one more line at the beginning: `# edited`."
    text = f"```python\n{code(tokenizer, seed, length)}```\n\n{asked}"
    return prompt_of(tokenizer, text, "```python\n# edited\n")


def code(tokenizer: TokenizerWrapper, seed: int, length: int) -> str:
    """Return lines of a module, of about `length` tokens."""
    rng, lines = random.Random(f"edit/{seed}"), list[str]()
    while sum(map(len, lines)) < 6 * length:  # characters: more than enough
        lines = rng.choice(modules()).source.splitlines(keepends=True)
    start = rng.randrange(len(lines) // 2)
    found, tokens = "", 0
    for line in lines[start:]:
        found, tokens = found + line, tokens + len(tokenizer.encode(line, add_special_tokens=False))
        if tokens >= length:
            break
    return found


TASKS: dict[str, Callable[[TokenizerWrapper, int, int], tuple[int, ...]]] = {
    "quote": quote_prompt,
    "edit": edit_prompt,
    "code": code_prompt,
    "chat": chat_prompt,
    "free": free_prompt,
}

# --- answers ---------------------------------------------------------------------------------------------------------


Answers = dict[tuple[str, str, str], list[Answer]]  # by prefill, task and arm


def engines(pair: ModelPair, options: argparse.Namespace) -> Iterator[tuple[str, Engine]]:
    """Return an engine for each requested kind of prefill that the pair supports.

    A prompt is read once where it is read in full. A sparse prefill of a cached prompt would have nothing to read.
    """
    policy, speculation = SpecPrefillPolicy(densify=False), SpeculationConfig(budget=options.budget)
    config = EngineConfig(speculation=speculation, policy=policy)
    uncached, sparse = replace(config, prefix_cache_bytes=0), pair.sparse_refusal is None
    if "full" in options.prefills:
        yield "full", Engine(pair, config)
    if "sparse" in options.prefills and sparse:
        yield "sparse", Engine(pair, uncached)


def answers_of(pair: ModelPair, arms: Sequence[SpeculationName], options: argparse.Namespace) -> Answers:
    """Return the answers. Prompts alternate between the tasks."""
    answers: Answers = {}
    with ExitStack() as running:
        prefills = {name: running.enter_context(engine) for name, engine in engines(pair, options)}
        for number in range(options.n):
            task = list(TASKS)[number % len(TASKS)]
            prompt = TASKS[task](pair.tokenizer, 7000 + number, options.length)
            for prefill, engine in prefills.items():
                sparse = prefill != "full"
                for arm in arms if number == 0 or not sparse else ():
                    answered(engine, prompt, arm, 1 if number else WARM_UP, sparse)
                for arm in arms if number % 2 else arms[::-1]:
                    answer = answered(engine, prompt, arm, options.tokens, sparse)
                    for group in (task, ALL):
                        answers.setdefault((prefill, group, arm), []).append(answer)
    return answers


def answered(engine: Engine, prompt: tuple[int, ...], arm: SpeculationName, count: int, sparse: bool) -> Answer:
    asked = SpecPrefillOptions(enabled=sparse, speculative=arm)
    request = GenerationRequest(
        as_token_ids(prompt), count, stop_token_ids=engine.pair.eos_token_ids, specprefill=asked
    )
    tokens, clock = list[int](), Clock()
    with counted_rows() as rows:
        for event in engine.generate(request):
            if isinstance(event, Progress):
                clock = Clock()
            elif isinstance(event, TokenEvent):
                tokens.append(event.token)
            elif isinstance(event, Finished):
                each = {name: spent / len(tokens) for name, spent in clock.read().items()}
                return Answer(tuple(tokens), **each, rows=tuple(rows), drafted=event.report.speculation)
    raise BenchError("a request failed")


@contextmanager
def counted_rows() -> Iterator[list[int]]:
    """Count the rows of each forward of a drafted row."""
    counted: list[int] = []
    forward = Rollback.forward

    def counting(self: Rollback, model: Callable[..., mx.array], tokens: mx.array) -> mx.array:
        counted.append(tokens.shape[1])
        return forward(self, model, tokens)

    with mock.patch.object(Rollback, "forward", counting):
        yield counted


def summary(prefill: str, task: str, arm: str, answers: Answers) -> Row:
    ours, off = answers[prefill, task, arm], answers[prefill, task, "off"]
    both = list(zip(ours, off, strict=True))
    times = [other.ms / one.ms for one, other in both]
    costs = [other.cost / one.cost for one, other in both]
    low, high = median_interval(times)
    reports = [one.drafted for one in ours if one.drafted is not None and one.speculated]
    rates = [one.acceptance_rate for one in reports if one.acceptance_rate is not None]
    return {
        "prefill": prefill,
        "task": task,
        "arm": arm,
        "n": len(ours),
        "ms_per_token": statistics.median(one.ms for one in ours),
        "vs_off": statistics.median(times),
        "low": low,
        "high": high,
        "mean": statistics.mean(times),
        "cpu_vs_off": statistics.median(other.cpu_ms / one.cpu_ms for one, other in both),
        "cost_vs_off": statistics.median(costs),
        "cost_mean": statistics.mean(costs),
        "acceptance": statistics.mean(rates) if rates else None,
        "engaged": len(reports),
        "different": sum(one.tokens != other.tokens for one, other in both),
    }


# --- start -----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arms", nargs="+", choices=STRATEGIES, help="default: all that the pair can run")
    parser.add_argument("-n", type=int, default=20, help="prompts, of each task in turn")
    parser.add_argument("--length", type=int, default=700, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--budget", type=int, default=256, help="tokens of a retrieved cache")
    parser.add_argument("--prefills", nargs="+", choices=PREFILLS, default=list(PREFILLS), help="those the pair can do")


def run(options: argparse.Namespace) -> dict[str, Any]:
    if min(options.n, options.tokens) < 1 or options.length < 64:
        raise BenchError("-n and --tokens must be at least 1, --length at least 64 tokens")
    pair = pairs.loaded(options, settings=Settings(speculative="draft"))  # all layers of the draft, which propose
    models = models_of(pair, EngineConfig())
    refused = {name: refusal(name, models) for name in STRATEGIES}
    able: list[SpeculationName] = [name for name, reason in refused.items() if reason is None]
    for name in options.arms or ():
        if refused[name] is not None:
            raise BenchError(f"{name}: {refused[name]}")
    arms: list[SpeculationName] = ["off", *(options.arms or able)]
    answers = answers_of(pair, arms, options)
    groups = [(prefill, task, arm) for prefill in PREFILLS for task in (*TASKS, ALL) for arm in arms]
    rows = rounded([summary(*group, answers) for group in groups if group in answers])
    show_rows(rows)
    worst = {
        f"{arm}_vs_off": min((row["vs_off"] for row in rows if row["arm"] == arm), default=None) for arm in arms[1:]
    }
    different = sum(row["different"] for row in rows if row["task"] == ALL)
    return {"benchmark": "decode", **worst, "different": different, "rows": rows}
