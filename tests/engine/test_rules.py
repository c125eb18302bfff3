"""The paper's rule, asked for where the pair has calibrated heads: another scorer, and nothing of the default's."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import mlx.core as mx
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    GenerationRequest,
    ModelPair,
    PrefillReport,
    RuleName,
    SelectionConfig,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)
from mlx_specprefill.adapters.depth import FirstLayers, full_draft_model
from mlx_specprefill.pair import with_heads
from mlx_specprefill.selection.heads import DraftHeads, Head
from tests.support.steps import finish
from tests.support.tiny import generated, random_prompt, tiny_pair

CONFIG = EngineConfig(
    policy=SpecPrefillPolicy(threshold=0, keep_pct=Fraction(1, 5), densify=False),
    selection=SelectionConfig(stands_out=math.inf),
    prefill_step=64,
)
HEADS = DraftHeads((Head(1, 3, 0.5), Head(0, 0, 0.25)), 2, 3, {"copy": 1.0})
OF_HEADS = "2 calibrated heads, 2 of 3 layers"
OF_PAPER = "8 look-ahead rows, maximum over the heads of 3 layers"
PROMPT = random_prompt(640)


def pair_with_heads() -> ModelPair:
    pair = with_heads(tiny_pair(), HEADS)
    assert isinstance(pair.draft, FirstLayers)
    return pair


def ask(engine: Engine, rule: RuleName | None, prompt: tuple[int, ...] = PROMPT) -> tuple[list[int], PrefillReport]:
    options = SpecPrefillOptions(rule=rule, return_spans=True)
    tokens, last = generated(engine.generate(GenerationRequest(prompt, 6, specprefill=options)))
    assert last.report.mode == "sparse", last.report.reason
    return tokens, last.report


def forget_target(engine: Engine) -> None:
    """Drop what the target has read: a prompt that it knows is not scored again."""
    cache = engine.caches._target
    engine._inbox.call(cache.clear)


def lone(rule: RuleName | None, pair: ModelPair, config: EngineConfig = CONFIG) -> tuple[list[int], PrefillReport]:
    with Engine(pair, config) as engine:
        return ask(engine, rule)


def test_each_rule_says_what_scored() -> None:
    pair = pair_with_heads()
    with Engine(pair, CONFIG) as engine:
        scorers = [ask(engine, rule)[1].scoring for rule in (None, "paper", "default")]
        forget_target(engine)
        scorers += [ask(engine, rule)[1].scoring for rule in ("default", "paper")]
        _, full = generated(engine.generate(GenerationRequest(PROMPT, 1, specprefill=SpecPrefillOptions(False))))
    assert scorers == [OF_HEADS, OF_PAPER, None, OF_HEADS, OF_PAPER]
    assert (full.report.scorer, full.report.scoring) == (None, None)
    assert full.report.to_dict()["scorer"] is None


def test_the_papers_rule_is_that_of_a_pair_without_heads() -> None:
    """The whole draft, look-ahead, chunks of 32: the same tokens are kept, and the same answer is given."""
    asked, plain = lone("paper", pair_with_heads()), lone("paper", tiny_pair())
    assert asked[0] == plain[0]
    assert asked[1].kept_spans == plain[1].kept_spans
    assert asked[1].kept_spans != lone(None, pair_with_heads())[1].kept_spans


def test_without_heads_the_default_scores_as_the_paper() -> None:
    assert lone(None, tiny_pair())[1].scoring == OF_PAPER


def test_a_server_may_go_by_the_papers_rule() -> None:
    config = replace(CONFIG, rule="paper")
    tokens, report = lone(None, pair_with_heads(), config)
    assert (report.scorer, report.scoring) == ("draft", OF_PAPER)
    assert (tokens, report.kept_spans) == (lone("paper", tiny_pair())[0], lone("paper", tiny_pair())[1].kept_spans)
    assert lone("default", pair_with_heads(), config)[1].scoring == OF_HEADS


class Forwards:
    """Tokens that went through the first layers and through the whole draft."""

    def __init__(self, pair: ModelPair, patch: pytest.MonkeyPatch) -> None:
        self.early = self.whole = 0
        draft = full_draft_model(pair.draft)
        inner, shallow = type(draft).__call__, FirstLayers.__call__

        def counted(this: Any, tokens: mx.array, *args: Any, **kwargs: Any) -> Any:
            self.whole += int(tokens.size) if this is draft else 0
            return inner(this, tokens, *args, **kwargs)

        def counted_early(this: Any, tokens: mx.array, *args: Any, **kwargs: Any) -> Any:
            self.early += int(tokens.size)
            return shallow(this, tokens, *args, **kwargs)

        patch.setattr(type(draft), "__call__", counted)
        patch.setattr(FirstLayers, "__call__", counted_early)

    def take(self) -> tuple[int, int]:
        counts = self.early, self.whole
        self.early = self.whole = 0
        return counts


def test_the_drafts_prefix_cache_is_the_default_rules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's rule reads everything anew and leaves nothing behind; the default's hit is as good as before."""
    pair = pair_with_heads()
    expected, (fresh, _) = lone("paper", tiny_pair())[1].kept_spans, lone(None, pair)
    with Engine(pair, CONFIG) as engine:
        forwards = Forwards(pair, monkeypatch)  # after what the engine measures
        assert ask(engine, "paper")[1].kept_spans == expected
        assert forwards.take() == (0, len(PROMPT) + CONFIG.scoring.rows - 1)
        ask(engine, None)
        assert forwards.take() == (len(PROMPT), 0)
        forget_target(engine)
        assert ask(engine, "paper")[1].kept_spans == expected
        assert forwards.take() == (0, len(PROMPT) + CONFIG.scoring.rows - 1)
        tokens, _ = ask(engine, None)
        early, whole = forwards.take()
    assert 0 < early <= CONFIG.scoring.question_rows[1]
    assert whole == 0
    assert tokens == fresh


def test_a_cancelled_reading_of_the_whole_draft_leaves_nothing_for_the_first_layers() -> None:
    pair = pair_with_heads()
    with Engine(pair, CONFIG) as engine:
        ask(engine, "paper")
        hit = finish(engine.prefiller.caches.draft_prefix(PROMPT, GenerationRequest(PROMPT, 1).label))
        assert hit is None
        ask(engine, None)
        hit = finish(engine.prefiller.caches.draft_prefix(PROMPT, GenerationRequest(PROMPT, 1).label))
        assert hit is not None


def test_sessions_of_one_rule_are_not_gone_on_with_by_the_other() -> None:
    pair = pair_with_heads()
    with Engine(pair, CONFIG) as engine:
        answer, first = ask(engine, None)
        more = (*PROMPT, *answer, *random_prompt(30, 4))
        _, other = ask(engine, "paper", more)
        _, same = ask(engine, None, more)
        _, paper = ask(engine, "paper", (*more, *random_prompt(5, 9)))
    assert (first.cached_tokens, other.cached_tokens) == (0, 0)
    assert same.cached_tokens == first.kept_tokens + len(answer)
    assert set(_indices(first)) <= set(_indices(same))
    assert paper.cached_tokens >= other.kept_tokens
    assert set(_indices(other)) <= set(_indices(paper))


def _indices(report: PrefillReport) -> list[int]:
    assert report.kept_spans is not None
    return [index for start, end in report.kept_spans for index in range(start, end)]
