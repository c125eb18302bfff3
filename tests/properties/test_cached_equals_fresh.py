"""A prefix that an engine has kept never changes a later dense answer: it is that of an engine that has seen nothing.

Every architecture takes part, however its first turns were read: in part, by its own first layers' choice or
another draft's, or in full; in one process, and after a restart.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from mlx_specprefill import (
    CacheLabel,
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
from mlx_specprefill.adapters.depth import smallest_depth
from mlx_specprefill.adapters.registry import adapter_for
from tests.support.oracle import build, runnable, tiny_models, vocabulary
from tests.support.precision import assert_close
from tests.support.refusals import SPECULATION_REFUSALS
from tests.support.tiny import on_own_layers, tiny_model, tokenizer

How = Literal["own layers", "draft", "full"]
NAMES = runnable()
SHALLOW = [name for name in NAMES if adapter_for(tiny_models()[name].architecture).depth_refusal is None]
PAIRS = [
    *((name, "own layers") for name in SHALLOW),
    *((name, "draft") for name in NAMES),
    *(pytest.param(name, "full", marks=pytest.mark.nightly) for name in NAMES),
]
POLICY = SpecPrefillPolicy(threshold=100, keep_pct=Fraction(1, 5), densify=False)
CONFIG = EngineConfig(policy=POLICY, prefill_step=64, prefix_cache_bytes=1 << 27)
SYSTEM, TOOLS, DOCUMENT, SAID = 12, 150, 300, 330  # where each message ends; 12 is shorter than a window
ANSWER = 3
Answers = list[tuple[list[int], list[float]]]


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@cache
def pair_of(name: str, how: How) -> ModelPair:
    model = build(name)
    words = vocabulary(model)
    config = {"max_position_embeddings": 4096, "vocab_size": words}
    if how == "own layers":
        return on_own_layers(make_pair(model, tokenizer(words), config), smallest_depth(model))
    draft = tiny_model("llama", 2, vocab_size=words)
    return make_pair(model, tokenizer(words), config, draft=draft, draft_config=config)


def texts(words: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the prompts of two turns, and of later requests that begin as these do for a while."""
    rng = np.random.default_rng(0)
    first = rng.integers(6, words, DOCUMENT).astype(np.int32)
    second = np.concatenate([first, rng.integers(6, words, SAID + 40 - DOCUMENT)]).astype(np.int32)
    other = rng.integers(6, words, 20).astype(np.int32)
    return [first, second], [
        first,
        *(np.concatenate([second[:end], other]) for end in (SYSTEM, TOOLS, TOOLS + 60, SAID)),
    ]


def request(text: np.ndarray, label: str, sparse: bool) -> GenerationRequest:
    """Ask with as many messages as the text is long."""
    ends = [end for end in (SYSTEM, TOOLS, DOCUMENT, SAID) if end < text.size] + [text.size]
    kinds = ("system", "tools", "user", "assistant", "user")
    starts = [0, *ends[:-1]]
    spans = tuple(PromptSpan(*span) for span in zip(kinds, starts, starts, ends, ends, strict=False))
    options = SpecPrefillOptions(None if sparse else False)
    return GenerationRequest(text, ANSWER, spans=spans, logprobs=0, specprefill=options, label=CacheLabel(label))


def ask(engine: Engine, texts: list[np.ndarray], label: str = "", sparse: bool = False) -> Answers:
    answers = []
    for text in texts:
        *events, last = [
            event for event in engine.generate(request(text, label, sparse)) if isinstance(event, TokenEvent | Finished)
        ]
        assert isinstance(last, Finished)
        answers.append(([event.token for event in events], [event.logprob for event in events]))
    return answers


def assert_same(found: Answers, fresh: Answers) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in fresh]
    assert_close([values for _, values in found], [values for _, values in fresh], atol=1e-4)


@pytest.mark.extended
@pytest.mark.parametrize(("name", "how"), PAIRS)
def test_later_dense_answers_are_those_of_a_fresh_engine(name: str, how: How, tmp_path: Path) -> None:
    """In the process that read the turns, and after a restart. A label's requests share nothing with another's."""
    if name == "plamo3":  # so an answer depends on where the prompt's forwards end
        pytest.skip(SPECULATION_REFUSALS[name])
    pair = pair_of(name, how)
    turns, later = texts(pair.vocab_size)
    kept = replace(CONFIG, prefix_cache_dir=tmp_path)
    with Engine(pair, replace(CONFIG, prefix_cache_bytes=0)) as engine:
        fresh = ask(engine, later)
    with Engine(pair, kept) as engine:
        for label in ("now", "later"):
            ask(engine, turns, label, sparse=how != "full")
        assert_same(ask(engine, later, "now"), fresh)
        assert engine.stats().fallbacks == {}
    with Engine(pair, kept) as engine:
        assert_same(ask(engine, later, "later"), fresh)
