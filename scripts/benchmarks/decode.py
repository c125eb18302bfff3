"""Answers by proposals against one token per forward, in one run.

Eight parts, chosen with `--parts`:

- `needle`: questions about codes in a long text, answered by the trained pair. Acceptance at both levels, tokens per
  target forward and time per token, for every strategy and for a StreamingLLM cache of the retrieval's budget that the
  target drafts on (the comparison of TriForce's table 1).
- `real`: passages of the standard library's documentation, to be explained; for pairs that can (`--pair smollm2`).
- `edit`: sources of the standard library, to be written again with an edit; the same.
- `shape`: random weights in a shape whose decoding reads far more keys and values than weights, on a cache of random
  keys. The draft shares the target's embeddings up to noise, which controls how often it is right.
- `gate`: requests that say `auto` and `off`, interleaved, through the engine, where only n-grams can win.
- `tasks`: quotes, edits of code and free answers through the engine, every strategy that the pair can run, and `auto`,
  against `off` behind the same cached prompt (`--pair smollm2 -n 20`). `ngram_vs_off` and `auto_vs_off` are the worst
  of the tasks; the aim is .98.
- `after`: decoding after a full and after a sparse prefill of the same prompts, on the pair and on a shape with random
  weights (`--shape`). `sparse_vs_full_ROWS` is tokens per second after sparse over those after full, of the pair;
  `shape_sparse_vs_full_ROWS` of the shape.
- `kv`: KV caches of 8 and 4 bits against unquantised ones after both prefills, on the same two: time and memory, and on
  the pair how far the next token's distribution moves over real text.

Arms are interleaved and times are medians over prompts.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    ModelPair,
    PrefillReport,
    SamplingParams,
    SpecPrefillOptions,
    SpeculationConfig,
    SpeculationName,
)
from mlx_specprefill.adapters.patches import install_patches
from mlx_specprefill.cache.positioned import make_positioned_cache
from mlx_specprefill.sampling import make_sampler
from mlx_specprefill.shapes import SHAPES
from mlx_specprefill.speculative.proposers import DraftModelProposer, Proposer
from mlx_specprefill.speculative.row import Limits, SpeculativeRow
from mlx_specprefill.speculative.strategies import STRATEGIES, ProposerInputs, refusals, streaming_drafter
from mlx_specprefill.speculative.token_sampler import TokenSampler

from .harness import BenchError, pairs
from .harness.after_prefill import after_prefill
from .harness.figures import Clock, ratio, rounded, show_rows
from .harness.kv_bits import compared_bits, divergences
from .harness.prefilled import Text, random_target
from .harness.prompts import codes_prompt, edit_prompt, passage_prompt, real_text
from .harness.stages import decode, finish, full_prefill
from .harness.tasks import task_answers, worst

PLAIN, MEANS, STREAMING = "autoregressive", "means", "streaming"
ARMS = (PLAIN, *(name for name, strategy in STRATEGIES.items() if not strategy.needs_head), MEANS, STREAMING)
PARTS = ("needle", "real", "edit", "shape", "gate", "tasks", "after", "kv")
PROMPTS = {"real": passage_prompt, "edit": edit_prompt}
SINKS = 16
TASK_ARMS: tuple[SpeculationName, ...] = ("draft", "ngram", "retrieval")
QUICK: dict[str, Any] = {"lengths": [1024], "n": 2, "context": 4096, "noise": [0.3], "repeats": 1}
QUICK |= {"turns": 2, "steps": 4, "rows": [1, 8]}

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["needle", "shape", "gate"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192, 16000], help="prompt tokens")
    parser.add_argument("--arms", nargs="+", choices=ARMS[1:], default=list(ARMS[1:]), help="beside plain decoding")
    parser.add_argument("-n", type=int, default=10, help="questions per length")
    parser.add_argument("--codes", type=int, default=4, help="six-digit codes in an answer")
    parser.add_argument("--budget", type=int, default=512, help="tokens that are retrieved, or kept by StreamingLLM")
    parser.add_argument("--chunk", type=int, default=16, help="tokens per retrieved chunk")
    parser.add_argument("--shortlist", type=int, default=4, help="chunks compared by their own keys, per chunk kept")
    parser.add_argument("--context", type=int, default=16384, help="cached tokens of the random shape")
    parser.add_argument("--noise", nargs="+", type=float, default=[0.0, 0.3], help="of the random draft")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer of the random shape")
    parser.add_argument("--repeats", type=int, default=3, help="answers per arm of the random shape")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32], help="of `after` and `kv`")
    parser.add_argument("--turns", type=int, default=10, help="pairs of `after` and `kv`")
    parser.add_argument("--steps", type=int, default=24, help="of each turn of `after` and `kv`")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b", help="of `after` and `kv`")
    parser.add_argument("--layers", type=int, default=4, help="of that shape")
    parser.add_argument("--narrow", type=int, default=8, help="divide its widths")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The chosen parts."""
    report: dict[str, Any] = {"bench": "decode", "budget": options.budget}
    started = time.perf_counter()
    pair = pairs.loaded(options)
    parts: dict[str, tuple[Sequence[Any], Callable[[Any], list[Row]]]] = {
        "needle": (options.lengths, lambda length: needle(pair, options, length)),
        "real": (options.lengths, lambda length: real(pair, options, length, "real")),
        "edit": (options.lengths, lambda length: real(pair, options, length, "edit")),
        "shape": (options.noise, lambda noise: shape(options, noise)),
    }
    for name, (values, part) in parts.items():
        if name in options.parts:
            report[name] = [row for value in values for row in part(value)]
    if "gate" in options.parts:
        report["gate"] = gate(pair, options)
        show_rows([report["gate"]])
    for name, measured in (("tasks", tasks), ("after", after), ("kv", kv)):
        if name in options.parts:
            report |= measured(pair, options)
    return {**report, "seconds": round(time.perf_counter() - started, 1)}


# --- one answer ------------------------------------------------------------------------------------------------------


def drafted(given: ProposerInputs, logits: mx.array, arm: str, limits: Limits, sampling: SamplingParams) -> Row:
    """One answer of one strategy; time does not include what the draft reads of the prompt."""
    if arm == MEANS:
        by_means = replace(given, config=replace(given.config, shortlist=1))
        return drafted(by_means, logits, "retrieval", limits, sampling)
    if arm == STREAMING:
        window = given.config.budget - SINKS
        proposer: Proposer = DraftModelProposer(finish(streaming_drafter(given.target, given.prompt, SINKS, window)))
        gamma = given.config.gamma2
    else:
        proposer = finish(STRATEGIES[arm].start(given))  # type: ignore[index]
        gamma = STRATEGIES[arm].gamma(given.config)  # type: ignore[index]
    sampler = TokenSampler(sampling, logits.shape[-1], stops=limits.stop_ids)
    row = SpeculativeRow(given.target, given.cache, logits, proposer, sampler, limits, gamma)
    clock = Clock()
    while not row.ended:
        row.step()
    return {"tokens": row.tokens, **clock.read(), "steps": row.steps, "outer": row.acceptance, "inner": proposer.inner}


def plain(given: ProposerInputs, logits: mx.array, limits: Limits, sampling: SamplingParams) -> Row:
    """One token per forward."""
    sampler = make_sampler(sampling, logits.shape[-1])
    tokens, spent = decode(given.target, given.cache, logits, sampler, limits)
    return {"tokens": tokens, **spent, "steps": len(tokens)}


def compared(makes: Callable[[], tuple[ProposerInputs, mx.array]], arms: Sequence[str], *rest: Any) -> dict[str, Row]:
    """Every arm's answer to one prefilled prompt."""
    return {arm: plain(*makes(), *rest) if arm == PLAIN else drafted(*makes(), arm, *rest) for arm in arms}


def summary(arm: str, answers: list[dict[str, Row]]) -> Row:
    """One line of a table: medians of times, ratios of sums."""
    ours = [answer[arm] for answer in answers]
    count, steps = sum(len(a["tokens"]) for a in ours), sum(a["steps"] for a in ours)
    row: Row = {"arm": arm, "tokens_per_step": round(count / steps, 3)}
    for clock in ("ms", "cpu_ms"):
        each = {name: [a[name][clock] / len(a[name]["tokens"]) for a in answers] for name in (PLAIN, arm)}
        row[f"{clock}_per_token"] = round(statistics.median(each[arm]), 3)
        row[clock.replace("ms", "gain")] = round(ratio(each[PLAIN], each[arm]), 3)
    for level in ("outer", "inner"):
        counts = [acceptance for a in ours if (acceptance := a.get(level)) is not None]
        judged = sum(acceptance.judged for acceptance in counts)
        row[level] = round(sum(acceptance.accepted for acceptance in counts) / judged, 4) if judged else None
    return row


def shown(head: Row, answers: list[dict[str, Row]], arms: Sequence[str]) -> list[Row]:
    rows = [{**head, **summary(arm, answers)} for arm in arms]
    show_rows(rows)
    return rows


# --- needles ---------------------------------------------------------------------------------------------------------


def needle(pair: ModelPair, options: argparse.Namespace, length: int) -> list[Row]:
    """The codes that were asked for, after a full prefill."""
    answers, arms, right = [], (PLAIN, *options.arms), 0
    for seed in range(options.n):
        depth = 0.1 + 0.6 * seed / max(1, options.n - 1)  # never among the recent tokens that every arm sees
        prompt, value = codes_prompt(pair.tokenizer, 7000 + seed, length, depth, options.codes)
        answers.append(answered(pair, options, prompt, arms, 16 * options.codes))
        right += value in pair.tokenizer.decode(answers[-1][PLAIN]["tokens"])
    head = {"part": "needle", "context": length, "codes": options.codes, "n": options.n, "right": right}
    return shown(head, answers, arms)


def real(pair: ModelPair, options: argparse.Namespace, length: int, part: str) -> list[Row]:
    """Answers to real text, after a full prefill; of the arms, those that this pair can run."""
    refused = refusals(pair.target, pair.proposer, pair.mtp)
    needs = {MEANS: "retrieval", STREAMING: "retrieval"}
    possible = [arm for arm in options.arms if refused[needs.get(arm, arm)] is None]
    for arm in set(options.arms) - set(possible):
        print(f"no {arm}: {refused[needs.get(arm, arm)]}")
    arms = (PLAIN, *possible)
    prompts = (PROMPTS[part](pair.tokenizer, 7000 + seed, length) for seed in range(options.n))
    answers = [answered(pair, options, prompt, arms, options.tokens) for prompt in prompts]
    return shown({"part": part, "context": length, "n": options.n}, answers, arms)


def answered(
    pair: ModelPair, options: argparse.Namespace, prompt: Sequence[int], arms: Sequence[str], tokens: int
) -> dict[str, Row]:
    """Every arm's answer to a prompt. All are greedy, so every arm must give the same tokens."""
    config = SpeculationConfig(budget=options.budget, chunk=options.chunk, shortlist=options.shortlist)
    draft = pair.draft if refusals(pair.target, pair.proposer, pair.mtp)["draft"] is None else None
    cache, read = make_positioned_cache(pair.target), None if draft is None else list(make_prompt_cache(draft))
    logits = full_prefill(pair.target, cache, prompt, 512)
    if draft is not None:
        full_prefill(draft, read, prompt, 512)

    def fresh() -> tuple[ProposerInputs, mx.array]:
        ours = None if draft is None else written_to(draft, read)
        return ProposerInputs(pair.target, written_to(pair.target, cache), tuple(prompt), config, draft, ours), logits

    found = compared(fresh, arms, Limits(tokens, pair.eos_token_ids), SamplingParams())
    different = [arm for arm in arms if found[arm]["tokens"] != found[PLAIN]["tokens"]]
    if different:
        raise BenchError(f"{different} answered something else than plain decoding")
    return found


def written_to(model: nn.Module, cache: list[Any]) -> list[Any]:
    """A copy of a cache of keys and values. The first write copies the arrays: it is made here, and taken back."""
    ours = copy.deepcopy(cache)
    mx.eval(model(mx.array([[2]]), cache=ours))
    for part in ours:
        part.trim(1)
    return ours


# --- random weights --------------------------------------------------------------------------------------------------

VOCAB, WIDTH, HEADS, HEAD_DIM = 512, 128, 16, 64
BLOCK = 256  # random keys and values that are repeated


def random_llama(layers: int, heads: int) -> nn.Module:
    config = {"model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": layers, "intermediate_size": 2 * WIDTH}
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": HEAD_DIM, "vocab_size": VOCAB}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 1 << 17}
    config |= {"tie_word_embeddings": False}
    return llama.Model(llama.ModelArgs.from_dict(config))


def shape_pair(noise: float) -> tuple[nn.Module, nn.Module]:
    """A target that mostly maps a token to the next one, and a small draft whose map is off by `noise`."""
    mx.random.seed(0)
    target, draft = random_llama(2, HEADS), random_llama(1, 1)
    embedding, head = mx.random.normal((VOCAB, WIDTH)), 0.3 * mx.random.normal((VOCAB, WIDTH))
    for model, off in ((target, 0.0), (draft, noise)):
        model.model.embed_tokens.weight = embedding
        model.lm_head.weight = head + 0.3 * off * mx.random.normal(head.shape)
        for layer in model.model.layers:
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight = 0.3 * part.weight
        mx.eval(model.parameters())
    return target, draft


def random_keys(model: nn.Module, length: int) -> list[Any]:
    """A cache as after `length` tokens."""
    cache = make_positioned_cache(model)
    for part in cache:
        blocks = (mx.random.normal((1, HEADS, BLOCK, HEAD_DIM)) for _ in range(2))
        keys, values = (mx.tile(block, (1, 1, -(-length // BLOCK), 1))[..., :length, :] for block in blocks)
        part.state = (keys, values, length), length, [(0, length)]
    mx.eval([part.state[0] for part in cache])
    return cache


def shape(options: argparse.Namespace, noise: float) -> list[Row]:
    """Sampled answers on a long cache; the draft reads only what TriForce's small model reads."""
    target, draft = shape_pair(noise)
    install_patches()
    config = SpeculationConfig(budget=options.budget, shortlist=options.shortlist, gamma1=3, gamma2=6, window=128)
    prompt = tuple(np.random.default_rng(0).integers(0, VOCAB, options.context).tolist())
    cache = random_keys(target, options.context)
    logits = target(mx.array([[1]]), cache=copy.deepcopy(cache))[:, -1]
    arms = (PLAIN, "retrieval", "triforce")

    def fresh() -> tuple[ProposerInputs, mx.array]:
        ours = copy.deepcopy(cache)
        target(mx.array([[2]]), cache=ours)  # the first write copies the arrays
        mx.eval([part.state[0] for part in ours])
        return ProposerInputs(target, ours, prompt, config, draft), logits

    draws = [SamplingParams(temperature=0.7, seed=seed) for seed in range(options.repeats)]
    compared(fresh, arms, Limits(8), draws[0])
    answers = [compared(fresh, arms, Limits(options.tokens), draw) for draw in draws]
    return shown({"part": "shape", "context": options.context, "noise": noise, "n": options.repeats}, answers, arms)


# --- the gate --------------------------------------------------------------------------------------------------------


def gate(pair: ModelPair, options: argparse.Namespace) -> Row:
    """The demonstration pair at a short context reads weights, not keys; whole requests are timed.

    Its answers to random tokens may repeat themselves, which n-grams find: then `auto` is the faster one.
    """
    times: dict[str, list[Row]] = {"off": [], "auto": []}
    reasons: set[str] = set()
    prompt = tuple(np.random.default_rng(1).integers(10, 4000, 200).tolist())
    with Engine(pair, EngineConfig(prefix_cache_bytes=0)) as engine:
        for repeat in range(2 * options.n + 1):
            for how in ("off", "auto") if repeat % 2 else ("auto", "off"):
                clock = Clock()
                account = spoken(engine, prompt, how)
                if repeat:  # the first one measures the pair
                    times[how].append(clock.read())
                if account.speculation is not None and how == "auto":
                    reasons.add(account.speculation.reason)
    row: Row = {"part": "gate", "n": 2 * options.n}
    for clock_name in ("ms", "cpu_ms"):
        off, auto = ([each[clock_name] for each in times[how]] for how in ("off", "auto"))
        row |= {f"off_{clock_name}": round(statistics.median(off), 2)}
        row |= {f"auto_{clock_name}": round(statistics.median(auto), 2)}
        row |= {clock_name.replace("ms", "loss"): round(ratio(auto, off) - 1, 4)}
    return {**row, "reasons": sorted(reasons)[:3]}


def spoken(engine: Engine, prompt: tuple[int, ...], how: SpeculationName) -> PrefillReport:
    options = SpecPrefillOptions(enabled=False, speculative=how)
    for event in engine.generate(GenerationRequest(prompt, 96, specprefill=options)):
        if isinstance(event, Finished):
            return event.account
    raise BenchError("a request failed")


# --- tasks, and what follows a prefill -------------------------------------------------------------------------------


def tasks(pair: ModelPair, options: argparse.Namespace) -> Row:
    """Of every strategy that can run, and `auto`."""
    refused = refusals(pair.target, pair.proposer, pair.mtp)
    arms = ("off", *(arm for arm in TASK_ARMS if refused[arm] is None), "auto")
    config = SpeculationConfig(budget=options.budget, chunk=options.chunk, shortlist=options.shortlist)
    rows = rounded(task_answers(pair, arms, config, options.n, options.lengths[0], options.tokens))
    show_rows(rows)
    found = {f"{arm}_vs_off": worst(rows, arm) for arm in ("ngram", "auto")}
    return {"tasks": rows, **found, "different": sum(row["different"] for row in rows)}


def both_targets(pair: ModelPair, options: argparse.Namespace) -> dict[str, tuple[nn.Module, Text]]:
    """The pair's with real text, the shape's with random weights and random tokens, by name."""
    install_patches()
    shape = random_target(options.shape, options.layers, options.narrow)
    return {"pair": (pair.target, lambda seed, length: real_text(pair.tokenizer, seed, length)), "shape": shape}


def after(pair: ModelPair, options: argparse.Namespace) -> Row:
    rows: list[Row] = []
    for name, (model, text) in both_targets(pair, options).items():
        sizes = options.lengths[0], options.rows, options.steps, options.turns
        rows += rounded(after_prefill(name, model, text, *sizes))
    show_rows(rows)
    heads = {"pair": "", "shape": "shape_"}
    ratios = {f"{heads[row['model']]}sparse_vs_full_{row['rows']}": row["sparse_vs_full"] for row in rows}
    return {"after": rows, **ratios}


def kv(pair: ModelPair, options: argparse.Namespace) -> Row:
    rows: list[Row] = []
    targets, length = both_targets(pair, options), options.lengths[0]
    for name, (model, text) in targets.items():
        rows += compared_bits(name, model, text, length, options.rows, options.steps, options.turns)
    apart = rounded(divergences(*targets["pair"], length, options.tokens, options.n), 6)
    rows = rounded(rows)
    for table in (rows, apart):
        show_rows(table)
    return {"kv": rows, "kv_kl": apart}
