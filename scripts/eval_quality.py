"""Needle accuracy of a pair: full prefill, sparse prefill, and random chunks at the sparse arm's budget.

    python scripts/eval_quality.py --target models/demo/target --draft models/demo/draft -n 50

Names, filler words, sentence frames and source files are ones that the training of the demonstration models leaves
out. Greedy decoding; an answer is right when the first number in it is the code. The random arm keeps the same forced
tokens and the same number of chunks as the sparse arm, chosen uniformly. The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import bisect
import json
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from training import tasks

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Failed,
    Finished,
    GenerationRequest,
    LoadError,
    ModelPair,
    PairMismatchError,
    Progress,
    PromptSpan,
    SpecPrefillOptions,
    TokenEvent,
    keep_pct,
    load_pair,
)
from mlx_specprefill.prefill.scoring import Scores

ARMS = ("full", "sparse", "random")
ANSWER_TOKENS = 40


def main(arguments: list[str] | None = None) -> None:
    """Run every cell and print the table."""
    options = _parser().parse_args(arguments)
    pair = _load(options.target, options.draft if set(options.arms) - {"full"} else None)
    started = time.perf_counter()
    cells: list[dict[str, Any]] = []
    examinee = Examinee(pair, options.keep)
    for length in options.lengths:
        for depth in options.depths:
            cells.append(_cell(examinee, options, length, depth))
            print("  ".join(f"{key} {value}" for key, value in cells[-1].items()), flush=True)
    for length in options.lengths:
        print(f"{length} tokens, all depths: {_means(cells, length, options.arms)}")
    report = {
        "eval": "needle",
        "n_per_cell": options.n,
        "keep_pct": float(options.keep),
        "variety": options.variety,
        "seed": options.seed,
        "summary": {str(length): _means(cells, length, options.arms) for length in options.lengths},
        "cells": cells,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/demo/target", help="model folder or hub name")
    parser.add_argument("--draft", default="models/demo/draft", help="model folder or hub name")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048], help="prompt tokens, at most")
    parser.add_argument("--depths", nargs="+", type=float, default=[0.1, 0.5, 0.9])
    parser.add_argument("-n", type=int, default=50, help="documents per length and depth")
    parser.add_argument("--keep", type=keep_pct, default=Fraction(1, 5), help="share of chunks that sparse keeps")
    parser.add_argument("--variety", type=int, default=0, help="repeat this many pieces of filler; 0: all different")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _load(target: str, draft: str | None) -> ModelPair:
    for folder in filter(None, (target, draft)):
        if folder.startswith((".", "/", "~", "models/")) and not Path(folder).expanduser().is_dir():
            sys.exit(f"error: no model folder {folder}")
    try:
        return load_pair(target, draft)
    except (LoadError, PairMismatchError) as error:
        sys.exit(f"error: {error}")


def _cell(examinee: Examinee, options: argparse.Namespace, length: int, depth: float) -> dict[str, Any]:
    right = dict.fromkeys(options.arms, 0)
    kept: list[float] = []
    for index in range(options.n):
        sample = tasks.needle_sample(options.seed + index, length, depth, examinee.count, variety=options.variety)
        question = examinee.question(sample, seed=options.seed + index)
        for arm in options.arms:
            reply = examinee.ask(arm, question)
            right[arm] += tasks.is_correct(reply.text, sample.turns[0].answer)
            kept += [reply.kept_share] if arm == "sparse" else []
    accuracy = {arm: round(count / options.n, 4) for arm, count in right.items()}
    share = {"kept_share": round(float(np.mean(kept)), 3)} if kept else {}
    return {"length": length, "depth": depth, "n": options.n, **accuracy, **share}


def _means(cells: list[dict[str, Any]], length: int, arms: list[str]) -> dict[str, float]:
    rows = [cell for cell in cells if cell["length"] == length]
    return {arm: round(sum(row[arm] for row in rows) / len(rows), 4) for arm in arms}


@dataclass(frozen=True)
class Question:
    """A rendered prompt, where its messages lie, and the seed of the random arm."""

    prompt: tuple[int, ...]
    spans: tuple[PromptSpan, ...]
    seed: int


@dataclass(frozen=True)
class Reply:
    """The generated text and the share of the prompt that the target saw."""

    text: str
    kept_share: float


class RandomChunks:
    """Ranks the chunks at random instead of asking the draft."""

    def __init__(self, chunk_size: int) -> None:
        self.seed = 0
        self._chunk_size = chunk_size

    def scores(self, request: GenerationRequest) -> Generator[Progress, None, Scores]:
        """Stands in for the prefiller's method of that name."""
        yield Progress("draft", 0, len(request.prompt))
        size, M = self._chunk_size, len(request.prompt)
        ranks = np.random.default_rng(self.seed).random(-(-M // size), dtype=np.float32)
        return Scores(np.repeat(ranks, size)[:M], (), 0, 0)


class Examinee:
    """A pair that answers questions after each arm's kind of prefill."""

    def __init__(self, pair: ModelPair, keep: Fraction) -> None:
        self._tokenizer = pair.tokenizer
        self._stops = pair.eos_token_ids
        self._keep = keep
        config = EngineConfig(prefix_cache_bytes=0)
        self._engine, self._random_engine = Engine(pair, config), Engine(pair, config)
        self._random = RandomChunks(config.selection.chunk_size)
        self._random_engine.prefiller.scores = self._random.scores  # type: ignore[method-assign]
        self._engine.start()
        self._random_engine.start()

    def count(self, text: str) -> int:
        """Tokens of a piece of text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def question(self, sample: tasks.Sample, seed: int) -> Question:
        """Render a sample without its last answer."""
        messages = sample.messages()[:-1]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inner = self._tokenizer._tokenizer  # mlx-lm's wrapper gives no character offsets
        encoded = inner(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in encoded["offset_mapping"]]
        return Question(tuple(encoded["input_ids"]), tuple(message_spans(text, messages, starts)), seed)

    def ask(self, arm: str, question: Question) -> Reply:
        """Greedy answer of the target."""
        request = GenerationRequest(
            prompt=question.prompt,
            max_tokens=ANSWER_TOKENS,
            spans=question.spans,
            stop_token_ids=self._stops,
            specprefill=SpecPrefillOptions(enabled=arm != "full", keep_pct=self._keep),
        )
        self._random.seed = question.seed
        engine = self._random_engine if arm == "random" else self._engine
        tokens: list[int] = []
        for event in engine.generate(request):
            if isinstance(event, TokenEvent) and event.token not in self._stops:
                tokens.append(event.token)
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                account = event.account
        if (account.mode == "sparse") != (arm != "full"):
            sys.exit(f"error: the {arm} arm ran in {account.mode} mode: {account.reason}")
        return Reply(self._tokenizer.decode(tokens), account.kept_tokens / account.prompt_tokens)


def message_spans(text: str, messages: list[tasks.Message], token_starts: list[int]) -> list[PromptSpan]:
    """Where each message lies in the prompt, from the characters of the rendered text to tokens.

    A message's header begins where the previous message ended; its end is the end of the line that closes it.
    """
    spans: list[PromptSpan] = []
    end = 0
    for message in messages:
        begin = text.index(message["content"], end)
        close = begin + len(message["content"])
        following = text.find("\n", close) + 1 or len(text)
        bounds = [bisect.bisect_left(token_starts, character) for character in (end, begin, close, following)]
        kind = message["role"] if message["role"] in ("system", "user", "assistant") else "other"
        spans.append(PromptSpan(kind, *bounds))  # type: ignore[arg-type]
        end = following
    return spans


if __name__ == "__main__":
    main()
