"""The items by which `auto` is calibrated, and what calibration makes of drafts that find all, some or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import load

from mlx_specprefill import DraftHeads, ScoringConfig, SelectionConfig
from mlx_specprefill.adapters.heads import Head
from mlx_specprefill.adapters.shares import MULTIPLES, ShareCurve
from mlx_specprefill.specprefill import share_calibration
from mlx_specprefill.specprefill.head_calibration import passage_mask, rendered
from mlx_specprefill.specprefill.scorer import Scores, ToScore
from mlx_specprefill.specprefill.share_calibration import find_shares
from mlx_specprefill.specprefill.share_items import SHARE_KINDS, share_items
from tests.tiny import tiny_pair

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
HEADS = DraftHeads((Head(0, 0, 1.0),), 1, 1, {})
PAIR = tiny_pair()
Look = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]


def test_every_kind_in_turn_on_documents_of_their_own() -> None:
    items = list(share_items(6))
    assert [item.kind for item in items[: len(SHARE_KINDS)]] == list(SHARE_KINDS)
    assert set(Counter(item.kind for item in items).values()) == {6}
    assert len({item.document for item in items}) == len(items)
    assert items == list(share_items(6))
    assert items != list(share_items(6, seed=2))


def test_gold_is_in_the_document_and_everything_is_gold_where_all_is_asked_for() -> None:
    for item in share_items(6):
        assert all(item.document.count(passage) == 1 for passage in (item.gold, *item.others))
        assert (item.gold == item.document) == (item.kind in ("count", "whole"))
        assert bool(item.others) == (item.kind in ("several", "two"))


def test_other_passages_are_found_in_the_rendered_prompt() -> None:
    tokenizer = load(DEMO / "draft")
    for item in share_items(2):
        tokens, places = rendered(tokenizer, item)
        for passage, (start, end) in zip((item.gold, *item.others), golds_of(places), strict=True):
            assert passage in tokenizer.decode(tokens[start:end].tolist())


def golds_of(places: dict[str, tuple[int, int]]) -> list[tuple[int, int]]:
    return [place for name, place in places.items() if name.startswith("gold")]


@dataclass
class Planted:
    """A scorer that knows where gold lies."""

    look: Look
    config: ScoringConfig
    golds: list[np.ndarray]

    def score(self, draft: Any, task: ToScore) -> Generator[Any, None, Scores]:
        yield from ()
        gold = self.golds.pop(0)
        assert task.template is not None
        return Scores(self.look(gold, ~task.template, np.random.default_rng(gold.size)).astype(np.float32))


def calibrated(monkeypatch: pytest.MonkeyPatch, look: Look, items: int = 20) -> ShareCurve:
    curve = calibrated_heads(monkeypatch, look, items).shares
    assert curve is not None
    return curve


def calibrated_heads(
    monkeypatch: pytest.MonkeyPatch, look: Look, items: int = 20, selection: SelectionConfig | None = None
) -> DraftHeads:
    golds = []
    for item in share_items(items, seed=1):
        tokens, places = rendered(PAIR.tokenizer, item)
        golds.append(passage_mask(tokens.size, *golds_of(places)))
    monkeypatch.setattr(share_calibration, "HeadScorer", lambda heads, config, ranks: Planted(look, config, golds))
    assert PAIR.draft is not None
    return find_shares(PAIR.draft, PAIR.tokenizer, HEADS, ScoringConfig(), selection or SelectionConfig(), items=items)


def all_gold(gold: np.ndarray, document: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Where everything is asked for, everything is looked at."""
    return gold + 1e-4 * document * rng.random(gold.size)


def elsewhere(gold: np.ndarray, document: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Sure of itself, and wrong."""
    return 1e-4 * document + passage_mask(gold.size, (60, 76)) * ~gold


def anywhere(gold: np.ndarray, document: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return document * (1 + 0.1 * rng.random(gold.size))


def test_a_draft_that_finds_all_gets_a_small_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrated(monkeypatch, all_gold)
    chosen = found.multiple(0.02)
    assert chosen is not None
    assert chosen <= 2
    assert found.kept[MULTIPLES.index(chosen)] < 0.6  # what asks for everything is kept whole: 2 of 7 kinds


def test_one_that_looks_elsewhere_is_never_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrated(monkeypatch, elsewhere)
    chosen = found.multiple(0.02)
    assert chosen is None or found.kept[MULTIPLES.index(chosen)] > 0.98
    assert found.misses[MULTIPLES.index(1.0)] > 80


def test_one_that_finds_nothing_is_never_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which loses nothing: every multiple will do, as every prompt goes full by all but the smallest."""
    found = calibrated(monkeypatch, anywhere)
    whole = [share for multiple, share in zip(MULTIPLES, found.kept, strict=True) if multiple >= 1]
    assert whole == [1.0] * len(whole)
    assert found.misses[: len(whole)] == (0,) * len(whole)


def test_progress_and_a_real_forward() -> None:
    assert PAIR.draft is not None
    told: list[tuple[int, int]] = []
    heads = DraftHeads((Head(0, 0, 1.0),), 3, 3, {})
    found = find_shares(
        PAIR.draft, PAIR.tokenizer, heads, ScoringConfig(), SelectionConfig(), lambda *done: told.append(done), items=1
    )
    assert told == [(number, 7) for number in range(1, 8)]
    assert found.shares is not None
    assert found.shares.items == 7
    assert list(found.shares.kept) == sorted(found.shares.kept, reverse=True)
    assert (found.heads, found.depth, found.recall) == (heads.heads, heads.depth, heads.recall)
    assert DraftHeads.from_dict(found.to_dict()).to_dict() == found.to_dict()


def test_half_of_how_far_codes_stand_out_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have eight times what everything else has, but one, which has six times that."""
    golds: list[int] = []

    def look(gold: np.ndarray, document: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        golds.append(int(gold.sum()))
        return document * np.where(gold, 6.0 if len(golds) == 1 + SHARE_KINDS.index("needle") else 8.0, 1.0)

    by_token = SelectionConfig(by_sentence=False)
    assert calibrated_heads(monkeypatch, look, 3, by_token).stands_out == pytest.approx(3.0)


def test_codes_that_do_not_stand_out_make_everything_chosen_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calibrated_heads(monkeypatch, elsewhere, 3).stands_out == 1.0
