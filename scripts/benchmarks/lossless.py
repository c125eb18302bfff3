"""Greedy answers of every way to draft, compared token for token with plain decoding, through the engine.

Each prompt is answered after a full and after a sparse prefill, alone and in a mixed batch in which plain and drafted
rows of all kinds run at the same time. The exit status is 1 if a token differs.
"""

from __future__ import annotations

import argparse
import queue
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Failed,
    Finished,
    GenerationRequest,
    ModelPair,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    SpeculationConfig,
    SpeculationName,
    TokenEvent,
)
from mlx_specprefill.speculative.strategies import StrategyName, refusals

from .harness import pairs
from .harness.prompts import needle_prompt, passage_prompt

QUICK = {"n": 4, "tokens": 64}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", choices=["codes", "real"], default="codes", help="made up, or the standard library's")
    parser.add_argument("-n", type=int, default=100, help="prompts")
    parser.add_argument("--first", type=int, default=0, help="prompts to leave out, to go on after an interruption")
    parser.add_argument("--length", type=int, default=700, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=256, help="generated per answer; the end of text does not end it")
    parser.add_argument("--budget", type=int, default=256, help="of the retrieved cache, so that it is not everything")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Answer, compare, report."""
    pair = pairs.loaded(options)
    config = EngineConfig(policy=SpecPrefillPolicy(densify=False), speculation=SpeculationConfig(budget=options.budget))
    names = [name for name, why in refusals(pair.target, pair.proposer, pair.mtp).items() if why is None]
    counts: Counter[str] = Counter()
    started = time.perf_counter()
    with Engine(pair, config) as engine:
        for seed in range(options.first, options.n):
            prompt = asked_about(pair, options, 9000 + seed)
            request = GenerationRequest(prompt, options.tokens)
            counts += compared(engine, request, names)
            print(f"prompt {seed}: {dict(counts)}, {time.perf_counter() - started:.0f} s", flush=True)
    return {"check": "lossless", "prompts": options.n - options.first, "tokens": options.tokens, **counts}


def asked_about(pair: ModelPair, options: argparse.Namespace, seed: int) -> tuple[int, ...]:
    if options.text == "real":
        return passage_prompt(pair.tokenizer, seed, options.length)
    return needle_prompt(pair.tokenizer, seed, options.length, 0.1 + 0.1 * (seed % 9))


def compared(engine: Engine, request: GenerationRequest, names: Sequence[StrategyName]) -> Counter[str]:
    """Identical and different answers of one prompt."""
    counts: Counter[str] = Counter()
    truths = {}
    for sparse in (False, True):
        truths[sparse] = ask_all(engine, [asked(request, sparse, None)])[0]
        for name in names:
            (answer,) = ask_all(engine, [asked(request, sparse, name)])
            counts["identical" if answer == truths[sparse] else "different"] += 1
    kinds = [(sparse, name) for sparse in (False, True) for name in (None, *names)]
    mixed = ask_all(engine, [asked(request, *kind) for kind in kinds])
    for (sparse, _), answer in zip(kinds, mixed, strict=True):
        counts["identical" if answer == truths[sparse] else "different"] += 1
    return counts


def asked(request: GenerationRequest, sparse: bool, how: SpeculationName | None) -> GenerationRequest:
    return replace(request, specprefill=SpecPrefillOptions(enabled=sparse, speculative=how))


def ask_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """Answers of requests that run at the same time."""
    inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in requests]
    for request, inbox in zip(requests, inboxes, strict=True):
        engine.submit(request, inbox.put)
    answers = []
    for inbox in inboxes:
        tokens: list[int] = []
        while not isinstance(event := inbox.get(), Finished):
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, TokenEvent):
                tokens.append(event.token)
        answers.append(tokens)
    return answers
