"""One rank of several on this machine, that runs the tests' tiny models: `python -m tests.distributed.worker CASE OUT`.

Rank 0 writes what came of it to OUT as JSON. The single process's results are computed here too, with the same weights.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_specprefill import (
    ContextLengthError,
    DraftHeads,
    Engine,
    EngineConfig,
    Failed,
    Finished,
    GenerationRequest,
    ModelPair,
    PrefillReport,
    RankedEngine,
    Ranks,
    SamplingParams,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
    join_ranks,
    make_pair,
    with_heads,
)
from mlx_specprefill.adapters import startup_checks
from mlx_specprefill.adapters.depth import layers_of
from mlx_specprefill.calibration.finding_heads import eligible_calls
from mlx_specprefill.engine.thread import loop
from mlx_specprefill.loading.one_model import shard
from mlx_specprefill.selection.heads import Head
from tests.support.oracle import build, tiny_models
from tests.support.tiny import tokenizer
from tests.support.waiting import eventually

TIMEOUT_S = 20.0
VOCABULARY = 128
CONFIG = EngineConfig(policy=SpecPrefillPolicy(threshold=100_000), prefill_step=64, prefix_cache_bytes=64 << 20)
NAMES = ("llama", "qwen3_5", "qwen3_next pipeline")
MORE_NAMES = ("gpt_oss", "qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5 4bit")
LOADED_NAMES = ("llama", "qwen3_next pipeline")
PROMPT, ANSWER = 200, 16
SPARSE = replace(CONFIG, policy=SpecPrefillPolicy(threshold=40, keep_pct=Fraction(1, 5), on_battery=True))


def pair(name: str, ranks: Ranks | None) -> ModelPair:
    """A tiny target, or this rank's part of it, and a tiny draft."""
    name, _, how = name.partition(" ")
    model = build(name, times=2 if how == "pipeline" else 1)  # so that every part has attention
    if how == "4bit":
        nn.quantize(model, group_size=32, bits=4)
    config = tiny_models()[name].config
    sharding = None
    if ranks is not None:
        sharding = shard(model, name, config, ranks)
        mx.eval(model.parameters())
    return make_pair(
        model,
        tokenizer(VOCABULARY),
        config | {"max_position_embeddings": 4096},
        draft=build("llama", seed=1) if ranks is None or ranks.leads else None,
        draft_config={"max_position_embeddings": 4096},
        ranks=ranks,
        sharding=sharding,
    )


@contextmanager
def running(made: ModelPair, config: EngineConfig = CONFIG) -> Iterator[Engine | None]:
    """An engine, or nothing on the ranks that follow."""
    assert made.ranks is not None
    if made.ranks.leads:
        with RankedEngine(made, config) as engine:
            yield engine
    else:
        RankedEngine(made, config).follow()
        yield None


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(2, VOCABULARY, length).tolist())


def request(length: int, keep: Fraction | None, seed: int = 0, **more: Any) -> GenerationRequest:
    options = SpecPrefillOptions(enabled=keep is not None, keep_pct=keep)
    return GenerationRequest(prompt(length, seed), ANSWER, specprefill=options, **more)


def answered(engine: Engine, asked: GenerationRequest) -> tuple[list[int], PrefillReport]:
    tokens, last = [], None
    for event in engine.generate(asked):
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
        if isinstance(event, Failed):
            raise event.error
        last = event
    assert isinstance(last, Finished)
    return tokens, last.report


# --- what is compared ------------------------------------------------------------------------------------------------

KEEPS = (None, Fraction(1, 5), Fraction(1))
MIXED = [request(60 + 37 * i, KEEPS[i % 2], seed=i) for i in range(8)]


def everything(engine: Engine) -> dict[str, Any]:
    """Distributions and answers, dense and sparse; an answer that starts from a cached prefix; one that is sampled."""
    found: dict[str, Any] = {}
    for keep in KEEPS:
        asked = request(PROMPT, keep)
        found[f"logprobs {keep}"] = engine.replay(asked, prompt(4, seed=9)).logprobs.tolist()
        found[f"tokens {keep}"], report = answered(engine, asked)
        found[f"kept {keep}"] = report.kept_tokens
    longer = GenerationRequest((*prompt(PROMPT), *prompt(20, seed=5)), ANSWER)
    found["tokens prefix"], report = answered(engine, longer)
    found["cached"] = report.cached_tokens
    found["inspected"] = engine.inspect(request(PROMPT, Fraction(1, 5))).kept_tokens
    punished = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5)
    found["tokens punished"], _ = answered(engine, replace(request(80, None), sampling=punished, logprobs=2))
    drawn = replace(request(PROMPT, Fraction(1, 5)), sampling=SamplingParams(temperature=0.9, seed=4))
    found["tokens drawn"], _ = answered(engine, drawn)
    return found


def sparse_answer(engine: Engine) -> dict[str, Any]:
    """Return the distributions and the answer of a sparse prefill."""
    asked = request(PROMPT, Fraction(1, 5))
    tokens, report = answered(engine, asked)
    return {"logprobs": engine.replay(asked, tokens).logprobs.tolist(), "tokens": tokens, "kept": report.kept_tokens}


def mixed(engine: Engine) -> dict[str, Any]:
    """Eight answers side by side, dense and sparse."""
    events: list[list[Any]] = [[] for _ in MIXED]
    for asked, seen in zip(MIXED, events, strict=True):
        engine.submit(asked, seen.append)
    waiting = [answered(engine, request(PROMPT, None))]
    while not all(seen and isinstance(seen[-1], (Finished, Failed)) for seen in events):
        waiting.append(answered(engine, request(40, None)))
    return {f"tokens row {i}": [e.token for e in seen if isinstance(e, TokenEvent)] for i, seen in enumerate(events)}


def turns(engine: Engine) -> dict[str, Any]:
    """A sparse conversation: its second turn goes on from the first, its third from what became dense meanwhile."""
    first = GenerationRequest(prompt(PROMPT), ANSWER)
    answer, report = answered(engine, first)
    found = {"tokens first": answer, "kept": report.kept_tokens}
    second = GenerationRequest((*first.prompt.tolist(), *answer, *prompt(60, seed=6)), ANSWER)
    answer, report = answered(engine, second)
    found |= {"tokens second": answer, "reused": report.cached_tokens}
    assert eventually(lambda: engine.stats().densified > 0)
    third = GenerationRequest((*second.prompt.tolist(), *answer, *prompt(60, seed=7)), ANSWER)
    answer, report = answered(engine, third)
    return found | {"tokens third": answer, "dense": report.cached_tokens}


def broken(engine: Engine) -> dict[str, Any]:
    """The draft fails: what follows is a full prefill, on all ranks."""

    def fail(*_: Any) -> Any:
        raise ValueError("the draft is broken")
        yield

    engine.prefiller.scorer._by_draft = fail
    tokens, report = answered(engine, request(PROMPT, Fraction(1, 5)))
    reason = report.reason.replace("EngineError: ", "")  # which is how the other ranks hear of it
    return {"tokens": tokens, "reason": reason, "kept": report.kept_tokens}


def forgetful(engine: Engine) -> dict[str, Any]:
    """Rank 1 has less room for prefixes than rank 0."""
    for seed in range(4):
        answered(engine, request(PROMPT, None, seed=seed))
    tokens, report = answered(engine, request(PROMPT, None, seed=0))
    return {"tokens": tokens, "cached": report.cached_tokens}


def stored(engine: Engine) -> dict[str, Any]:
    """Return the answer to a prompt that an earlier engine may have stored on disk."""
    tokens, report = answered(engine, request(PROMPT, None))
    return {"tokens": tokens, "cached": report.cached_tokens}


def limited(engine: Engine) -> dict[str, Any]:
    """Rank 1 has less memory than rank 0."""
    try:
        engine.check(request(3000, None))
        refused = None
    except ContextLengthError as error:
        refused = str(error)
    tokens, _ = answered(engine, request(PROMPT, None))
    _, report = answered(engine, request(2000, Fraction(1, 5)))  # what rank 1 has room for, without a draft
    return {"tokens": tokens, "window": engine.window, "refused": refused, "mode": report.mode}


def crowd(engine: Engine) -> dict[str, Any]:
    """Conversations that come and go, are cancelled, inspected and forgotten, while others are made dense."""
    failed: list[str] = []
    threads = [threading.Thread(target=_talk, args=(engine, seed, failed)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"failed": failed, "answers": engine.stats().prefix_misses > 0}


def _talk(engine: Engine, seed: int, failed: list[str]) -> None:
    chance = random.Random(seed)
    said = list(prompt(chance.randint(30, 400), seed))
    for turn in range(3):
        options = SpecPrefillOptions(chance.choice([None, True, False]), chance.choice([None, Fraction(1, 2)]))
        sampling = SamplingParams(temperature=chance.choice([0.0, 0.8]))
        asked = GenerationRequest(tuple(said), chance.randint(1, ANSWER), sampling, options)
        last = chance.choice([1000, 1000, 5, 12])
        for count, event in enumerate(events := engine.generate(asked)):
            failed += [str(event.error)] if isinstance(event, Failed) else []
            said += [event.token] if isinstance(event, TokenEvent) else []
            if count == last:
                events.close()
        said += prompt(chance.randint(5, 120), 100 * seed + turn)
        if seed % 3 == turn:
            engine.inspect(asked)
            engine.drop_cached()
        time.sleep(chance.random() / 2)


def compared(
    ranks: Ranks,
    name: str,
    run: Callable[[Engine], dict[str, Any]],
    config: EngineConfig = CONFIG,
    make: Callable[[Ranks | None], ModelPair] | None = None,
) -> Any:
    """Return the ranks' results beside those of one process."""
    make = make or partial(pair, name)
    alone = ranks.broadcast("alone", lambda: _alone(make, run, config))
    if not ranks.leads and run is forgetful:
        config = replace(config, prefix_cache_bytes=100 << 10)
    if not ranks.leads and run is limited:
        config = replace(config, memory_limit=7 << 20)
    with running(make(ranks), config) as engine:
        found = None if engine is None else run(engine)
    return {"one": alone, "several": found}


def _alone(
    make: Callable[[Ranks | None], ModelPair], run: Callable[[Engine], dict[str, Any]], config: EngineConfig
) -> dict[str, Any]:
    with Engine(make(None), config) as engine:
        return run(engine)


def equal(ranks: Ranks) -> dict[str, Any]:
    found = {name: compared(ranks, name, everything) for name in NAMES}
    found["llama, 8 rows"] = compared(ranks, "llama", mixed)
    found["turns"] = compared(ranks, "llama", turns, SPARSE)
    found["broken"] = compared(ranks, "llama", broken)
    return found


def more(ranks: Ranks) -> dict[str, Any]:
    found = {name: compared(ranks, name, everything) for name in MORE_NAMES}
    found["quantised cache"] = compared(ranks, "qwen3", sparse_answer, replace(CONFIG, kv_bits=8))
    disk = Path(sys.argv[2]).with_name("prefixes")
    found["first"] = compared(ranks, "qwen3", stored, replace(CONFIG, prefix_cache_dir=disk))
    found["stored"] = compared(ranks, "qwen3", stored, replace(CONFIG, prefix_cache_dir=disk))
    found["limited"] = compared(ranks, "qwen3", limited)
    found["forgetful"] = compared(ranks, "llama", forgetful)
    return found


def busy(ranks: Ranks) -> dict[str, Any]:
    """Little room for caches, on disk too, and background work as soon as there is nothing else."""
    loop._QUIET_S = 0.1
    disk = Path(sys.argv[2]).with_name("prefixes")
    config = replace(SPARSE, prefix_cache_bytes=3 << 20, prefix_cache_dir=disk, prefix_disk_bytes=4 << 20, max_rows=4)
    with running(pair("qwen3", ranks), config) as engine:
        return {} if engine is None else crowd(engine)


def idle(ranks: Ranks) -> dict[str, Any]:
    """Waits for requests, until somebody kills a rank."""
    with running(pair("llama", ranks)) as engine:
        print("waiting", flush=True)
        while engine is not None:
            time.sleep(1)
    return {}


def astray(ranks: Ranks) -> dict[str, Any]:
    """Rank 1 alone fails in a prefill, which rank 0 goes on with."""

    def fail(*_: Any) -> Any:
        raise ValueError("this rank is broken")
        yield

    engine = RankedEngine(pair("llama", ranks), CONFIG)
    if not ranks.leads:
        engine.prefiller.run = fail
        engine.follow()
    with engine:
        answered(engine, request(PROMPT, None))
    return {}


# --- the target's own first layers, whose heads are split -------------------------------------------------------------

SPLIT_NAMES = ("llama", "qwen3", "gpt_oss", "qwen3_5")
SPLIT_KINDS = ("both ranks", "the last rank")


def split_pair(name: str, kind: str, ranks: Ranks | None) -> ModelPair:
    """A target whose own first layers score: heads at either end of every attention call that sees all, or at one."""
    config, sharding = tiny_models()[name].config, None
    target = build(name, times=2)
    calls, layers = eligible_calls(target), len(layers_of(target))
    if ranks is not None:
        sharding = shard(target, name, config, ranks)
        mx.eval(target.parameters())
    made = make_pair(
        target,
        tokenizer(VOCABULARY),
        config | {"max_position_embeddings": 4096},
        draft="self",
        ranks=ranks,
        sharding=sharding,
    )
    depth = layers // 2
    last = config.get("text_config", config)["num_attention_heads"] - 1
    within = [call for call in calls if call < len(calls) * depth // layers] or [min(calls)]
    numbers = (last,) if kind == "the last rank" else (0, last)
    heads = tuple(Head(call, head, 1.0 + head + call) for call in within for head in numbers)
    return with_heads(made, DraftHeads(heads, depth, layers, {"needle": 1.0}))


def scored(engine: Engine) -> dict[str, Any]:
    """Scores, what is chosen by them, and answers; a conversation that goes on, and requests that were given up."""
    asked = request(PROMPT, Fraction(1, 5))
    seen = engine.inspect(asked)
    found: dict[str, Any] = {"importance": seen.importance.tolist(), "spans": seen.kept_spans}
    found["own layers"] = engine.pair.scores_itself
    given_up = engine.generate(request(600, Fraction(1, 5), seed=3))
    for _ in range(3):
        next(given_up)
    given_up.close()
    found["tokens"], report = answered(engine, asked)
    found |= {"kept": report.kept_tokens, "scorer": report.scorer, "words": report.scoring}
    longer = GenerationRequest((*asked.prompt.tolist(), *found["tokens"], *prompt(60, seed=6)), ANSWER)
    options = replace(longer, specprefill=asked.specprefill)
    found["tokens of the next turn"], report = answered(engine, options)
    found |= {"reused": report.cached_tokens, "read": report.draft_tokens}
    return found


def split(ranks: Ranks) -> dict[str, Any]:
    found = {}
    for name in SPLIT_NAMES:
        for kind in SPLIT_KINDS:
            make = partial(split_pair, name, kind)
            found[f"{name}, {kind}"] = compared(ranks, name, scored, make=make)
    return found


def loaded(ranks: Ranks) -> dict[str, Any]:
    """Sparse answers over the ranks, and the refusal of the last model if the second rank's part fails the check."""
    found = {name: compared(ranks, name, sparse_answer) for name in LOADED_NAMES}
    if not ranks.leads:
        startup_checks._agree = lambda *_: False
    found["refusal"] = pair(LOADED_NAMES[-1], ranks).sparse_refusal
    return found


CASES: dict[str, Callable[[Ranks], dict[str, Any]]] = {
    "equal": equal,
    "split": split,
    "more": more,
    "busy": busy,
    "idle": idle,
    "astray": astray,
    "loaded": loaded,
}


def main() -> None:
    mx.disable_compile()
    loop._QUIET_S = 3.0  # a slow machine must not begin to densify between two turns
    with mx.stream(mx.cpu):
        ranks = join_ranks(TIMEOUT_S)
        assert ranks is not None
        found = CASES[sys.argv[1]](ranks)
    if ranks.leads:
        Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
