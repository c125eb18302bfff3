"""What an engine has kept never changes a later dense answer: it is that of an engine that has seen nothing.

Every architecture takes part, however its first turns were read: in two stages by the target's own layers, in part by
another draft's choice, or in full; in one process, and after a restart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Literal

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    ModelPair,
    PromptSpan,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
    make_pair,
)
from mlx_specprefill.adapters.registry import adapter_for
from tests.support.oracle import build, runnable, tiny_models, vocabulary
from tests.support.precision import assert_close
from tests.support.staged_oracle import deep_enough, splits
from tests.support.tiny import on_own_layers, tiny_model, tokenizer

How = Literal["staged early", "staged late", "draft", "full"]
NAMES = runnable()
STAGED = [name for name in NAMES if adapter_for(tiny_models()[name].architecture).staged_refusal is None]
READ = [
    *((name, how) for name in STAGED for how in ("staged early", "staged late")),
    *((name, how) for name in NAMES for how in ("draft", "full")),
]
POLICY = SpecPrefillPolicy(threshold=100, keep_pct=Fraction(1, 5), densify=False)
CONFIG = EngineConfig(policy=POLICY, prefill_step=64, prefix_cache_bytes=1 << 27)
SYSTEM, TOOLS, DOCUMENT, SAID = 12, 150, 400, 450  # where each message ends; 12 is shorter than a window
ANSWER = 4
Answer = tuple[list[int], list[float]]


@cache
def pair_of(name: str, how: How) -> ModelPair:
    staged = how in ("staged early", "staged late")
    model = deep_enough(name) if staged else build(name)
    words = vocabulary(model)
    config = {"max_position_embeddings": 4096, "vocab_size": words}
    if staged:
        counts = splits(model)
        return on_own_layers(make_pair(model, tokenizer(words), config), counts[0 if how == "staged early" else -1])
    draft = tiny_model("llama", 2, vocab_size=words)
    return make_pair(model, tokenizer(words), config, draft=draft, draft_config=config)


def request(text: np.ndarray, sparse: bool) -> GenerationRequest:
    """Ask with as many messages as the text is long."""
    ends = [end for end in (SYSTEM, TOOLS, DOCUMENT, SAID) if end < text.size] + [text.size]
    kinds = ("system", "tools", "user", "assistant", "user")
    starts = [0, *ends[:-1]]
    spans = tuple(PromptSpan(*span) for span in zip(kinds, starts, starts, ends, ends, strict=False))
    options = SpecPrefillOptions(None if sparse else False)
    return GenerationRequest(text, ANSWER, spans=spans, logprobs=0, specprefill=options)


def ask(engine: Engine, asked: GenerationRequest) -> Answer:
    *events, last = [event for event in engine.generate(asked) if isinstance(event, (TokenEvent, Finished))]
    assert isinstance(last, Finished)
    return [event.token for event in events], [event.logprob for event in events]


def texts(words: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the prompts of two turns, and of later requests that begin as these do for a while."""
    rng = np.random.default_rng(0)
    first = rng.integers(6, words, DOCUMENT).astype(np.int32)
    second = np.concatenate([first, rng.integers(6, words, SAID + 40 - DOCUMENT)]).astype(np.int32)
    other = rng.integers(6, words, 30).astype(np.int32)
    shared = (SYSTEM, TOOLS, TOOLS + 60, DOCUMENT, SAID)
    return [first, second], [first, *(np.concatenate([second[:count], other]) for count in shared)]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(("name", "how"), READ)
def test_later_dense_answers_are_those_of_a_fresh_engine(
    name: str, how: How, restart: bool, tmp_path: Path
) -> None:
    pair = pair_of(name, how)
    turns, later = texts(pair.vocab_size)
    kept = replace(CONFIG, prefix_cache_dir=tmp_path if restart else None)

    def answers(engine: Engine) -> Iterator[Answer]:
        return (ask(engine, request(text, sparse=False)) for text in later)

    with Engine(pair, replace(CONFIG, prefix_cache_bytes=0)) as engine:
        fresh = list(answers(engine))
    engine = Engine(pair, kept)
    with engine:
        for text in turns:
            ask(engine, request(text, sparse=how != "full"))
        found = [] if restart else list(answers(engine))
        assert engine.stats().fallbacks == {}
    if restart:
        with Engine(pair, kept) as engine:
            found = list(answers(engine))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in fresh]
    assert_close([values for _, values in found], [values for _, values in fresh], atol=1e-4)
    mx.clear_cache()
