"""A dense prefix is what full reading leaves, whatever idle work read before it was interrupted.

Random sessions on every family and kind of draft. Between two turns the engine does a random number of idle steps. Then
what the exact cache holds of the turn is compared with a forward over the whole text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import mlx.core as mx
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
    make_pair,
)
from mlx_specprefill.engine.requests.job import Job
from mlx_specprefill.engine.thread import loop
from mlx_specprefill.selection.heads import DraftHeads, Head
from mlx_specprefill.selection.retrieval_heads import RetrievalHeads
from tests.support.dense import assert_is_full_reading
from tests.support.oracle import on_the_cpu_unfused
from tests.support.retrieval_heads import write_heads
from tests.support.tiny import (
    CONFIGS,
    FAMILIES,
    VOCAB,
    generated,
    on_own_layers,
    random_prompt,
    tiny_model,
    tiny_pair,
    tokenizer,
)
from tests.support.waiting import eventually

PLAIN = ("llama", "qwen3")  # attention, as trained heads need
PAIRS = [
    (family, kind)
    for family in FAMILIES
    for kind in ("draft", "own layers", "trained heads")
    if kind != "trained heads" or family in PLAIN
]
POLICY = SpecPrefillPolicy(threshold=60, keep_pct=Fraction(1, 5))
CONFIG = EngineConfig(policy=POLICY, prefill_step=32, prefix_cache_bytes=64 << 20, target_itl_ms=0.01)
ANSWER = 6
SEEING = {"llama": 0, "qwen3": 0, "qwen3_5": 0, "nemotron_h": 0, "gpt_oss": 1}  # an attention call that sees all


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    with on_the_cpu_unfused():
        yield


class IdleSteps:
    """Lets an engine do a number of steps in idle time, and no more."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = 0
        picked = loop.EngineCore._next_prefill

        def allowed(core: Any) -> Job | None:
            job = picked(core)
            if job is None or not job.background:
                return job
            self.left -= 1
            return job if self.left >= 0 else None

        patch.setattr(loop.EngineCore, "_next_prefill", allowed)
        patch.setattr(loop.EngineCore, "_quiet_s", property(lambda core: 0.0 if self.left > 0 else 3600.0))

    def do(self, engine: Engine, count: int) -> None:
        """Do so many steps, or all that there are."""
        self.left = count
        engine._inbox.call(lambda: None)
        assert eventually(lambda: self.left <= 0 or not engine.densifier.turns, 60)
        self.left = 0


def pair_of(family: str, kind: str, folder: Path) -> ModelPair:
    if kind == "draft":
        return tiny_pair(family)
    target, config = tiny_model(family, 1), {"max_position_embeddings": 4096, "vocab_size": VOCAB}
    if kind == "own layers":
        pair = on_own_layers(make_pair(target, tokenizer(), config), 2)
        return replace(pair, heads=DraftHeads((Head(SEEING[family], 0, 1.0),), 2, 4, {}))
    mx.random.seed(0)
    size = CONFIGS[family].get("text_config", CONFIGS[family])["hidden_size"]
    write_heads(folder / "heads.safetensors", RetrievalHeads(size, 3, 8, 1e-5), target, 2, {"origin": "a test"})
    return make_pair(target, tokenizer(), config, draft="self", draft_heads=folder / "heads.safetensors")


def spans_of(ends: list[int]) -> tuple[PromptSpan, ...]:
    """Return messages that end there: a system prompt, then user and assistant by turns."""
    kinds = ["system", *("user" if number % 2 else "assistant" for number in range(1, len(ends)))]
    starts = [0, *ends[:-1]]
    return tuple(PromptSpan(kind, start, start, end, end) for kind, start, end in zip(kinds, starts, ends, strict=True))


class Session:
    """A conversation of random length, one turn at a time."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._label = CacheLabel(f"session-{seed}")
        self._ends: list[int] = []
        self.prompt: tuple[int, ...] = ()
        self.turns = int(self._rng.integers(2, 7))

    def ask(self, engine: Engine, idle: IdleSteps) -> GenerationRequest:
        """Ask the next turn and pause. Return a request for its text and answer."""
        rng, start, is_first = self._rng, len(self.prompt), not self.prompt
        length = int(rng.integers(100, 300) if is_first else rng.integers(8, 120))
        self.prompt += random_prompt(length, int(rng.integers(1 << 30)))
        self._ends = [*self._ends, 10 if is_first else start, len(self.prompt)]
        how = SpecPrefillOptions((True, None, None, False)[int(rng.integers(4))], verify=bool(rng.integers(2)))
        request = GenerationRequest(self.prompt, ANSWER, spans=spans_of(self._ends), specprefill=how, label=self._label)
        answer, last = generated(engine.generate(request))
        assert isinstance(last, Finished)
        self.prompt += tuple(answer)
        self.turns -= 1
        idle.do(engine, int(rng.choice([0, *range(1, 24), 1000])))
        return replace(request, prompt=self.prompt)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_a_dense_prefix_is_what_full_reading_leaves(
    family: str, kind: str, restarts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle, dense, sessions = IdleSteps(monkeypatch), 0, [Session(seed) for seed in range(5)]
    pair, config = pair_of(family, kind, tmp_path), replace(CONFIG, prefix_cache_dir=tmp_path if restarts else None)
    while sessions:
        with Engine(pair, config) as engine:
            for session in sessions:
                for _ in range(1 if restarts else session.turns):
                    text = session.ask(engine, idle)
                    dense += assert_is_full_reading(engine, text)
            assert engine.stats().fallbacks == {}
        sessions = [session for session in sessions if session.turns]
    assert dense
