"""A draft that reads within a window scores alike whatever its forwards, and its caches serve no dense reading."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    ModelPair,
    RuleName,
    ScoringConfig,
    SelectionConfig,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    SpeculationConfig,
)
from mlx_specprefill.config import DraftWindow
from mlx_specprefill.engine.prefixes.caches import EngineCaches, draft_window
from mlx_specprefill.pair import with_heads
from mlx_specprefill.selection.heads import DraftHeads, Head
from mlx_specprefill.selection.scorer import HeadScorer, Scores
from tests.support.scoring import scoring_input
from tests.support.steps import finish
from tests.support.tiny import generated, on_own_layers, random_prompt, tiny_pair

WINDOW = DraftWindow(tokens=32, sinks=4, block=32)
HEADS = DraftHeads((Head(1, 3, 0.5), Head(0, 0, 0.25)), 2, 3, {"copy": 1.0})
CONFIG = EngineConfig(
    scoring=ScoringConfig(window=WINDOW),
    policy=SpecPrefillPolicy(threshold=0, keep_pct=Fraction(1, 5), densify=False),
    selection=SelectionConfig(stands_out=math.inf),
    prefill_step=64,
)
DENSE = replace(CONFIG, scoring=ScoringConfig(window=None))
PROMPT = random_prompt(640)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return with_heads(tiny_pair(), HEADS)


def scores(pair: ModelPair, window: DraftWindow | None, step: int) -> Scores:
    assert pair.draft is not None
    task = scoring_input(pair.draft, PROMPT, CONFIG.scoring, step=lambda: step, window=window)
    return finish(HeadScorer(HEADS, CONFIG.scoring).score(pair.draft, task))


def test_the_lengths_of_forwards_do_not_matter(pair: ModelPair) -> None:
    truth = scores(pair, WINDOW, 640).importance
    for step in (1, 37, 64):
        np.testing.assert_allclose(scores(pair, WINDOW, step).importance, truth, rtol=1e-3, atol=1e-7)
    assert np.abs(scores(pair, None, 640).importance - truth).max() > 0.01 * truth.max()


def forget_target(engine: Engine) -> None:
    """Drop what the target has read: a prompt that it knows is not scored again."""
    cache = engine.caches._target
    engine._inbox.call(cache.clear)


def chosen(engine: Engine, prompt: tuple[int, ...], rule: RuleName | None = None) -> tuple[object, int]:
    """Return the kept spans, and how many tokens the draft read."""
    options = SpecPrefillOptions(rule=rule, return_spans=True)
    _, last = generated(engine.generate(GenerationRequest(prompt, 1, specprefill=options)))
    assert last.report.mode == "sparse", last.report.reason
    return last.report.kept_spans, last.report.draft_tokens


def test_the_papers_rule_reads_densely(pair: ModelPair) -> None:
    found = []
    for config in (CONFIG, DENSE):
        with Engine(pair, config) as engine:
            found.append([chosen(engine, PROMPT, rule)[0] for rule in ("paper", None)])
    (paper, default), (dense_paper, dense_default) = found
    assert paper == dense_paper
    assert default != dense_default


def test_a_later_prompt_reads_what_is_new_and_chooses_as_a_fresh_one(pair: ModelPair) -> None:
    longer = PROMPT + random_prompt(320, seed=1)
    with Engine(pair, CONFIG) as engine:
        _, read = chosen(engine, PROMPT)
        assert read == len(PROMPT)
        forget_target(engine)
        later, read = chosen(engine, longer)
        assert read < len(longer) - len(PROMPT) + 64
    with Engine(pair, CONFIG) as engine:
        assert later == chosen(engine, longer)[0]


def test_a_reading_within_a_window_serves_no_dense_one(pair: ModelPair) -> None:
    caches = [EngineCaches(pair, config)._draft for config in (CONFIG, DENSE)]
    names = {cache._identity for cache in caches if cache is not None}
    assert len(names) == 2


def test_who_reads_densely(pair: ModelPair) -> None:
    assert draft_window(pair, CONFIG) == WINDOW
    assert draft_window(tiny_pair(), CONFIG) is None
    assert draft_window(on_own_layers(pair, 2), CONFIG) is None
    assert draft_window(pair, replace(CONFIG, speculation=SpeculationConfig("draft"))) is None
    assert draft_window(pair, replace(CONFIG, speculation=SpeculationConfig("ngram"))) == WINDOW


def test_a_draft_without_calibrated_heads_scores_as_published() -> None:
    """The published rule reads the whole prompt, also where it is all that is known of a draft."""
    found = []
    for config in (CONFIG, DENSE):
        with Engine(tiny_pair(), config) as engine:
            found.append(chosen(engine, PROMPT))
    assert found[0] == found[1]


def test_a_draft_that_read_within_its_window_proposes_and_changes_no_answer() -> None:
    """Where a request alone asks for drafted answers. The target checks each proposal."""
    pair = with_heads(tiny_pair(), HEADS, exit_early=False)
    with Engine(pair, CONFIG) as engine:
        plain, drafted = (
            generated(engine.generate(GenerationRequest(PROMPT, 12, specprefill=SpecPrefillOptions(speculative=how))))
            for how in (None, "draft")
        )
    assert drafted[0] == plain[0]
    assert isinstance(drafted[1], Finished)
    assert drafted[1].report.speculation.strategy == "draft"
