"""Whoever guesses another label's prompt sees what a cold engine shows, whatever that label left behind.

Time is work: how many tokens each model is fed for a request tells whether it was warm, and no clock is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from mlx_specprefill import (
    CacheLabel,
    Engine,
    EngineConfig,
    GenerationRequest,
    ModelPair,
    PromptSpan,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)
from mlx_specprefill.engine.thread import loop
from tests.support.tiny import generated, random_prompt, tiny_pair
from tests.support.waiting import eventually

ANN, BOB = CacheLabel("ann"), CacheLabel("bob")
LENGTH = 600
SECRET = random_prompt(LENGTH)
WRONG = (*SECRET[:-40], *random_prompt(40, 9))
POLICY = SpecPrefillPolicy(threshold=100, keep_pct=Fraction(1, 5))
CONFIG = EngineConfig(policy=POLICY, prefill_step=64, prefix_cache_bytes=64 << 20)
OTHERS = [BOB, CacheLabel(), CacheLabel("ann", "salt"), CacheLabel("", "ann")]
Seen = tuple[int, str | None, dict[str, int]]


@contextmanager
def fed(pair: ModelPair, patch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Tokens that the models are fed."""
    names = {id(pair.target): "target", id(pair.draft): "draft"}
    counts: Counter[str] = Counter()
    with patch.context() as inner:
        for kind in {type(pair.target), type(pair.draft)}:
            original = kind.__call__

            def counting(model: Any, tokens: Any, *rest: Any, _call: Any = original, **more: Any) -> Any:
                counts[names.get(id(model), "other")] += tokens.size
                return _call(model, tokens, *rest, **more)

            inner.setattr(kind, "__call__", counting)
        yield counts


def asked(prompt: tuple[int, ...], label: CacheLabel, sparse: bool, speculative: str = "off") -> GenerationRequest:
    options = SpecPrefillOptions(sparse, speculative=speculative)
    spans = (PromptSpan("user", 0, 0, len(prompt), len(prompt)),)
    return GenerationRequest(prompt, 2, specprefill=options, spans=spans, label=label)


def look(engine: Engine, request: GenerationRequest, patch: pytest.MonkeyPatch) -> Seen:
    """All that tells a client whether its prompt was known: counts and work."""
    with fed(engine.pair, patch) as counts:
        _, last = generated(engine.generate(request))
    return last.report.cached_tokens, last.report.recalled_tokens, dict(counts)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """No background work until this is called."""
    monkeypatch.setattr(loop.EngineCore, "_quiet_s", float("inf"))
    return lambda: monkeypatch.setattr(loop.EngineCore, "_quiet_s", 0.0)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=pytest.mark.extended)])
@pytest.mark.parametrize("sparse", [False, True], ids=["full", "sparse"])
@pytest.mark.extended
def test_a_guess_is_answered_as_by_a_cold_engine(
    family: str, sparse: bool, monkeypatch: pytest.MonkeyPatch, quiet: Callable[[], None]
) -> None:
    pair = tiny_pair(family)
    guesses = [SECRET, WRONG, (*SECRET, 5, 6, 7), SECRET[:300]]
    with Engine(pair, CONFIG) as engine:
        cold = []
        for guess in guesses:
            cold.append(look(engine, asked(guess, ANN, sparse), monkeypatch))
            engine.drop_cached()
        look(engine, asked(SECRET, ANN, sparse), monkeypatch)
        assert look(engine, asked(SECRET, ANN, sparse), monkeypatch) != cold[0]  # warm for its own label
        for label in OTHERS:
            for guess, seen in zip(guesses, cold, strict=True):
                assert look(engine, asked(guess, label, sparse), monkeypatch) == seen, (label, len(guess))
                engine.drop_cached(owner=label.owner) if label.owner != "ann" else _drop_salted(engine)


def _drop_salted(engine: Engine) -> None:
    """Drop the salted entries that a guess left. The entry of "ann" stays."""
    for cache in (engine.caches._target, engine.caches._draft):
        for entry in [entry for entry in cache.entries() if entry.label.salt]:
            assert engine._inbox.call(lambda cache=cache, entry=entry: cache.drop(entry.id))


@pytest.mark.extended
def test_the_token_by_token_attack_learns_nothing(monkeypatch: pytest.MonkeyPatch, quiet: Callable[[], None]) -> None:
    """The attacker knows all but the next token and tries every one: all tries look alike."""
    known = 256
    with Engine(tiny_pair(), CONFIG) as engine:
        look(engine, asked(SECRET, ANN, False), monkeypatch)

        def tries(owner: str) -> list[Seen]:
            seen: list[Any] = []
            for token in range(2, 96, 7):
                for guess in (SECRET[known], token):
                    label = CacheLabel(owner, f"try{len(seen)}")  # a try must not warm the next one
                    seen.append(look(engine, asked((*SECRET[:known], guess, 3), label, False), monkeypatch))
            return seen

        assert len({str(one) for one in tries("bob")}) == 1
        right, wrong = (
            look(engine, asked((*SECRET[:known], token, 3), ANN, False), monkeypatch)
            for token in (SECRET[known], (SECRET[known] + 1) % 94 + 2)
        )
        assert right[0] > wrong[0]  # the attack works where the cache is shared


def test_a_sparse_turn_is_continued_by_its_own_label_only(
    monkeypatch: pytest.MonkeyPatch, quiet: Callable[[], None]
) -> None:
    new = random_prompt(200, 4)

    def turn(answer: list[int], label: CacheLabel) -> GenerationRequest:
        said = (*SECRET, *answer)
        spans = (
            PromptSpan("user", 0, 0, len(said), len(said)),
            PromptSpan("user", *[len(said)] * 2, *[len(said) + 200] * 2),
        )
        return replace(asked((*said, *new), label, True), spans=spans)

    with Engine(tiny_pair(), CONFIG) as engine:
        answer, _ = generated(engine.generate(asked(SECRET, ANN, True)))
        guess = look(engine, turn(answer, BOB), monkeypatch)
        own = look(engine, turn(answer, ANN), monkeypatch)
        engine.drop_cached()
        cold = look(engine, turn(answer, ANN), monkeypatch)
    assert guess == cold
    assert guess[0] == 0
    assert own[0] > 0


@pytest.mark.parametrize("speculative", ["draft", "triforce", "ngram"])
def test_what_drafted_answers_leave_is_labelled_too(
    speculative: str, monkeypatch: pytest.MonkeyPatch, quiet: Callable[[], None]
) -> None:
    with Engine(tiny_pair(), CONFIG) as engine:
        look(engine, asked(SECRET, ANN, False, speculative), monkeypatch)
        assert {entry.kind for entry in engine.cached("ann")} <= {"target", "draft"}
        warm = look(engine, asked(SECRET, ANN, False, speculative), monkeypatch)
        guess = look(engine, asked(SECRET, BOB, False, speculative), monkeypatch)
        assert (guess[0], warm[0] > 0) == (0, True)
        assert guess[2]["target"] >= LENGTH


def test_explaining_a_prompt_tells_nothing_either(monkeypatch: pytest.MonkeyPatch, quiet: Callable[[], None]) -> None:
    with Engine(tiny_pair(), CONFIG) as engine:
        look(engine, asked(SECRET, ANN, True), monkeypatch)
        work = []
        for label in (BOB, ANN):
            with fed(engine.pair, monkeypatch) as counts:
                engine.inspect(asked(SECRET, label, True))
            work.append(counts["draft"])
    assert work[0] > LENGTH > work[1]


def test_idle_time_makes_dense_under_the_same_label(monkeypatch: pytest.MonkeyPatch, quiet: Callable[[], None]) -> None:
    with Engine(tiny_pair(), CONFIG) as engine:
        generated(engine.generate(asked(SECRET, ANN, True)))
        quiet()
        assert eventually(lambda: engine.stats().densified == 1, 60)
        assert {entry.kind for entry in engine.cached("ann")} == {"target", "draft", "session"}
        assert engine.cached("bob") == engine.cached("") == ()
        assert look(engine, asked((*SECRET, 5), BOB, False), monkeypatch)[0] == 0
        assert look(engine, asked((*SECRET, 5), ANN, False), monkeypatch)[0] == LENGTH


def test_labels_hold_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: Callable[[], None]) -> None:
    config = replace(CONFIG, prefix_cache_dir=tmp_path)
    with Engine(tiny_pair(), config) as engine:
        generated(engine.generate(asked(SECRET, ANN, False)))
    with Engine(tiny_pair(), config) as engine:
        assert look(engine, asked(SECRET, BOB, False), monkeypatch)[0] == 0
        assert look(engine, asked(SECRET, ANN, False), monkeypatch)[0] == LENGTH - 1
