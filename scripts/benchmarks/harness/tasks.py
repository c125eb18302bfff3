"""Answers to real text through the engine, drafted in every way that the pair can, against those that are not."""

from __future__ import annotations

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

from . import BenchError
from .alternating import median_interval
from .prompts import edit_prompt, passage_prompt, quote_prompt

__all__ = ["TASKS", "task_answers", "worst"]

TASKS: dict[str, Callable[[TokenizerWrapper, int, int], tuple[int, ...]]] = {
    "quote": quote_prompt,
    "edit": edit_prompt,
    "free": passage_prompt,
}


@dataclass(frozen=True)
class Answer:
    """`ms`: per token after the first one."""

    tokens: tuple[int, ...]
    ms: float
    drafted: SpeculationReport | None

    @property
    def speculated(self) -> bool:
        return self.drafted is not None and self.drafted.strategy != "autoregressive"


def task_answers(
    pair: ModelPair, arms: Sequence[SpeculationName], config: SpeculationConfig, n: int, length: int, tokens: int
) -> list[dict[str, Any]]:
    """`n` prompts, a third of each task, in turn. A prompt is read once; every arm decodes behind the cached prefix.

    One line per task and arm. `vs_off` is the median over the prompts of tokens per second over those of "off" for the
    same prompt, with the ends of its 95 % interval. `engaged` says for how many prompts a strategy ran,
    `different` how many answers are not those of "off"; all are greedy.
    """
    answers: dict[tuple[str, str], list[Answer]] = {}
    engine_config = EngineConfig(speculation=config, policy=SpecPrefillPolicy(densify=False))
    with Engine(pair, engine_config) as engine:
        for number in range(n):
            task = list(TASKS)[number % len(TASKS)]
            prompt = TASKS[task](pair.tokenizer, 7000 + number, length)
            for arm in {*arms, "off"}:  # read the prompt, with the draft too, and measure what is measured once
                answered(engine, prompt, arm, 1 if number else 8)
            for arm in arms if number % 2 else tuple(reversed(arms)):
                answers.setdefault((task, arm), []).append(answered(engine, prompt, arm, tokens))
    return [summary(task, arm, answers) for task in TASKS for arm in arms if (task, arm) in answers]


def answered(engine: Engine, prompt: tuple[int, ...], how: SpeculationName, count: int) -> Answer:
    options = SpecPrefillOptions(enabled=False, speculative=how)
    tokens, times = [], []
    for event in engine.generate(GenerationRequest(prompt, count, specprefill=options)):
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
            times.append(time.perf_counter())
        elif isinstance(event, Finished):
            ms = 1e3 * (times[-1] - times[0]) / max(1, len(times) - 1)
            return Answer(tuple(tokens), ms, event.account.speculation)
    raise BenchError("a request failed")


def summary(task: str, arm: str, answers: dict[tuple[str, str], list[Answer]]) -> dict[str, Any]:
    ours, off = answers[task, arm], answers[task, "off"]
    pairs = [(one, other) for one, other in zip(ours, off, strict=True) if len(one.tokens) > 1]
    ratios = [other.ms / one.ms for one, other in pairs]
    low, high = median_interval(ratios)
    reports = [one.drafted for one in ours if one.drafted is not None and one.speculated]
    rates = [one.acceptance_rate for one in reports if one.acceptance_rate is not None]
    steps = [one.tokens_per_step for one in reports if one.tokens_per_step is not None]
    return {
        "part": "tasks",
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


def worst(rows: Sequence[dict[str, Any]], arm: str) -> float | None:
    """The lowest `vs_off` of an arm over the tasks; the aim is .98."""
    found = [row["vs_off"] for row in rows if row["arm"] == arm and row["vs_off"] is not None]
    return min(found, default=None)
