"""A share chosen per prompt, through the engine: what is kept, what goes full, and what the account says."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    ModelPair,
    PrefillReport,
    RuleName,
    SelectionConfig,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)
from mlx_specprefill.adapters.heads import DraftHeads, Head
from mlx_specprefill.adapters.shares import MULTIPLES, ShareCurve
from mlx_specprefill.engine import prefill as prefiller
from mlx_specprefill.loading import with_heads
from mlx_specprefill.specprefill.head_scorer import HeadScorer
from mlx_specprefill.specprefill.scorer import Scores
from mlx_specprefill.specprefill.selector import Selection
from tests.tiny import generated, random_prompt, tiny_pair

CONFIG = EngineConfig(policy=SpecPrefillPolicy(threshold=0, densify=False), prefill_step=64)
GOOD = ShareCurve(400, tuple(0 if multiple >= 1 else 400 for multiple in MULTIPLES), (0.5,) * len(MULTIPLES))
HEADS = DraftHeads((Head(1, 3, 0.5),), 2, 3, {"copy": 1.0}, GOOD)
PROMPT = random_prompt(800)
AUTO = SpecPrefillOptions(keep_pct="auto", return_spans=True)


def pair_with(shares: ShareCurve | None = GOOD) -> ModelPair:
    return with_heads(tiny_pair(), replace(HEADS, shares=shares))


def ask(engine: Engine, options: SpecPrefillOptions = AUTO, prompt: tuple[int, ...] = PROMPT) -> PrefillReport:
    _, last = generated(engine.generate(GenerationRequest(prompt, 2, specprefill=options)))
    assert isinstance(last, Finished)
    return last.account


def looks_at(monkeypatch: pytest.MonkeyPatch, *chunks: int) -> None:
    """The draft looks at these chunks, all alike, and nowhere else; without any, everywhere."""
    importance = np.full(len(PROMPT), 0.0 if chunks else 1.0, dtype=np.float32)
    for chunk in chunks:
        importance[8 * chunk : 8 * chunk + 8] = 1.0

    def score(self, draft, task):
        yield from ()
        return Scores(importance, "draft", "planted", cache=task.cache)

    monkeypatch.setattr(HeadScorer, "score", score)


def asks(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setattr(prefiller.Prefiller, "_asked", lambda *_: words)


@pytest.fixture(autouse=True)
def _pointed(monkeypatch: pytest.MonkeyPatch) -> None:
    asks(monkeypatch, "Where does Harriet work?")


def test_what_is_found_in_few_chunks_keeps_few(monkeypatch: pytest.MonkeyPatch) -> None:
    looks_at(monkeypatch, 40, 41)
    with Engine(pair_with(), CONFIG) as engine:
        found = ask(engine)
    assert found.mode == "sparse", found.reason
    assert found.auto_share is not None
    assert 0.05 <= found.auto_share < 0.2
    assert found.kept_spans is not None
    assert any(start <= 320 and end >= 336 for start, end in found.kept_spans)
    told = found.to_dict()
    assert (told["keep"], told["share"]) == ("auto", round(found.auto_share, 4))
    assert "is found in" in told["reason"]


def test_what_is_everywhere_goes_full_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    looks_at(monkeypatch)
    with Engine(pair_with(), CONFIG) as engine:
        found, plain = ask(engine), ask(engine, SpecPrefillOptions(enabled=False))
    assert (found.mode, found.kept_tokens, found.auto_share) == ("full", len(PROMPT), 1.0)
    assert "is spread over" in found.reason
    assert plain.auto_share is None
    assert "keep" not in plain.to_dict()


def test_the_answer_after_that_is_the_full_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    looks_at(monkeypatch)
    with Engine(pair_with(), CONFIG) as engine:
        whole = [list(generated(engine.generate(GenerationRequest(PROMPT, 8, specprefill=options)))[0]) for options in
                 (AUTO, SpecPrefillOptions(enabled=False))]  # fmt: skip
    assert whole[0] == whole[1]


def test_a_question_about_everything_does_not_ask_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    asks(monkeypatch, "Please summarise this.")
    monkeypatch.setattr(HeadScorer, "score", None)
    with Engine(pair_with(), CONFIG) as engine:
        found = ask(engine)
    assert found.mode == "full"
    assert found.reason == 'the question is about the whole prompt ("summarise")'
    assert engine.prefiller.fallbacks.total() == 0


@pytest.mark.parametrize(
    ("shares", "rule", "words"),
    [
        (None, None, "is not known"),
        (ShareCurve(100, (0,) * len(MULTIPLES), (0.5,) * len(MULTIPLES)), None, "it takes 114"),
        (
            ShareCurve(400, (400,) * len(MULTIPLES), (0.5,) * len(MULTIPLES)),
            None,
            "certifies no share for a loss of 0.02",
        ),
        (GOOD, "paper", "default rule only"),
    ],
)
def test_without_a_promise_it_is_full(shares: ShareCurve | None, rule: RuleName | None, words: str) -> None:
    with Engine(pair_with(shares), CONFIG) as engine:
        found = ask(engine, SpecPrefillOptions(enabled=True, keep_pct="auto", rule=rule))
    assert found.mode == "full"
    assert words in found.reason


@pytest.mark.parametrize("over_lines", [False, True])
def test_chunks_are_chosen_as_they_were_when_the_curve_was_measured(
    over_lines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks_at(monkeypatch, 40, 41)
    configs: list[SelectionConfig] = []
    select = prefiller.select_tokens

    def selected(*arguments: Any) -> Selection:
        configs.append(arguments[-1])
        return select(*arguments)

    monkeypatch.setattr(prefiller, "select_tokens", selected)
    with Engine(pair_with(replace(GOOD, over_lines=over_lines)), CONFIG) as engine:
        assert ask(engine).mode == "sparse"
        assert ask(engine, SpecPrefillOptions(enabled=True)).mode == "sparse"
    assert [config.over_lines for config in configs] == [over_lines, False]


def test_a_request_may_allow_more_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    looks_at(monkeypatch, 40)
    falling = tuple(20 if multiple < 8 else 0 for multiple in MULTIPLES)
    curve = ShareCurve(400, falling, (0.5,) * len(MULTIPLES))
    with Engine(pair_with(curve), CONFIG) as engine:
        strict, loose = ask(engine), ask(engine, replace(AUTO, max_loss=0.1))
    assert strict.auto_share is not None
    assert loose.auto_share is not None
    assert loose.auto_share < strict.auto_share


def test_the_servers_own_share_may_be_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    looks_at(monkeypatch, 40)
    config = replace(CONFIG, policy=replace(CONFIG.policy, keep_pct="auto"))
    with Engine(pair_with(), config) as engine:
        found = ask(engine, SpecPrefillOptions())
        given = ask(engine, SpecPrefillOptions(keep_pct=Fraction(1, 2)))
    assert found.auto_share is not None
    assert given.auto_share is None
    assert given.kept_share == pytest.approx(0.5, abs=0.02)


def test_inspection_shows_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    looks_at(monkeypatch, 40, 41)
    with Engine(pair_with(), CONFIG) as engine:
        few = engine.inspect(GenerationRequest(PROMPT, 1, specprefill=AUTO))
        looks_at(monkeypatch)
        every = engine.inspect(GenerationRequest(PROMPT, 1, specprefill=AUTO))
    assert few.mode == "sparse"
    assert few.auto_share is not None
    assert few.auto_share < 0.2
    assert (every.mode, every.auto_share, every.kept_tokens) == ("full", 1.0, len(PROMPT))
