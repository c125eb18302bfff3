"""Which heads calibration takes: planted ones are found, those that look elsewhere and those of windows are not."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.tokenizer_utils import load

from mlx_specprefill import ScoringConfig, SelectionConfig, SparseUnsupportedError, load_pair
from mlx_specprefill.adapters.depth import full_draft_model
from mlx_specprefill.calibration import finding_heads as calibration
from mlx_specprefill.calibration.finding_heads import (
    KINDS,
    CalibrationItem,
    _choose_heads,
    _rank_heads,
    _Read,
    calibration_items,
    eligible_calls,
    find_heads,
)
from mlx_specprefill.selection.heads import DraftHeads
from mlx_specprefill.selection.text import PromptText
from tests.support.tiny import tiny_model

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
SCORING, SELECTION = ScoringConfig(), SelectionConfig()
M, GOLD = 400, 16  # tokens
Looks = Mapping[tuple[int, int], float]


def read(kind: str, seed: int, looks: Looks) -> _Read:
    """An item whose gold lies anywhere, and heads that spend this share of their attention on it, the rest elsewhere.

    A negative share: all of it on sixteen other tokens, away from gold.
    """
    rng = np.random.default_rng(seed)
    start = int(rng.integers(60, 300))
    gold, template = np.zeros(M, dtype=np.bool_), np.zeros(M, dtype=np.bool_)
    gold[start : start + GOLD] = template[:4] = template[380:] = True
    rows: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
    for key, share in looks.items():
        row = np.zeros(M)
        row[4:380] = rng.random(376) + 0.01
        row[gold] = 0
        row *= (1 - max(share, 0)) / row.sum()
        row[gold] = max(share, 0) / GOLD
        if share < 0:
            row[:] = 1e-6
            row[(start + 120) % 300 + 10 :][:GOLD] = 1
        rows[key] = row.astype(np.float32)
    return _Read(kind, rows, gold, template, PromptText(np.arange(0, M, 20, dtype=np.int32)))


def reads(looks: Looks) -> list[_Read]:
    return [read(kind, 10 * number + index, looks) for number, kind in enumerate(KINDS) for index in range(4)]


def chosen(looks: Looks, family: str = "llama", layers: int = 12) -> DraftHeads:
    return _choose_heads(tiny_model(family, num_hidden_layers=layers), reads(looks), SCORING, SELECTION)


def even(calls: int, heads: int = 4) -> dict[tuple[int, int], float]:
    """Heads that look away from gold."""
    return {(call, head): -1.0 for call in range(calls) for head in range(heads)}


# --- which heads -----------------------------------------------------------------------------------------------------


def test_heads_are_ranked_by_their_mean_gain_over_the_kinds() -> None:
    """Not over the items: a kind with many items counts as one with few."""
    some = [read("copy", 1, {(0, 0): 0.9, (0, 1): 0.5})] * 9 + [read("needle", 2, {(0, 0): 0.1, (0, 1): 0.7})]
    assert [head.head for head in _rank_heads(some)] == [1, 0]
    assert _rank_heads(some)[0].weight == pytest.approx(0.6 - GOLD / 376, abs=1e-6)


def test_a_planted_head_is_found_and_those_without_gain_are_not_chosen() -> None:
    found = chosen({**even(12), (3, 2): 0.6})
    assert [(head.call, head.head) for head in found.heads] == [(3, 2)]
    assert (found.layers, set(found.recall), min(found.recall.values())) == (12, set(KINDS), 1.0)
    assert found.refusal is None


def test_as_many_heads_as_keep_the_most() -> None:
    """Each of two finds one kind of item only; together they find both. Two more look elsewhere, but gain a little."""
    items = []
    for index in range(4):
        for number, kind in enumerate(KINDS):
            at = {(1, 0): 0.6 if kind == "copy" else 0.0, (1, 1): 0.0 if kind == "copy" else 0.5}
            items.append(read(kind, 10 * number + index, {**even(12), **at}))
    found = _choose_heads(tiny_model("llama", num_hidden_layers=12), items, SCORING, SELECTION)
    assert {(head.call, head.head) for head in found.heads} == {(1, 0), (1, 1)}
    assert min(found.recall.values()) == 1.0


# --- how deep --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [0, 2, 7, 11])
def test_the_depth_is_the_least_that_holds_the_head(call: int) -> None:
    found = chosen({**even(12), (call, 1): 0.6})
    assert (found.depth, found.heads[0].call) == (call + 1, call)


# --- what can't be calibrated ----------------------------------------------------------------------------------------


def test_where_no_head_gains_nothing_is_found() -> None:
    with pytest.raises(SparseUnsupportedError, match="no head of the draft looks from a question at its answer"):
        chosen(even(12))


def test_a_draft_that_finds_little_must_not_choose() -> None:
    """A head that looks at gold a little and at six other passages more."""
    items = reads({(3, 2): 0.06})
    for item in items:
        others = np.flatnonzero(~item.gold & ~item.template).reshape(-1, 18)[::3]
        item.rows[3, 2][~item.gold] = 0
        item.rows[3, 2][others] = 0.94 / others.size
    found = _choose_heads(tiny_model("llama", num_hidden_layers=12), items, SCORING, SELECTION)
    assert max(found.recall.values()) < 0.5
    assert found.refusal is not None
    assert "no head of the draft looks" in found.refusal


def test_calls_of_windows_are_never_eligible() -> None:
    assert eligible_calls(tiny_model("gpt_oss")) == {1, 3}
    pattern = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert eligible_calls(tiny_model("gpt_oss", layer_types=pattern)) == {0, 3}
    assert eligible_calls(tiny_model("llama")) == {0, 1, 2}
    assert eligible_calls(tiny_model("nemotron_h")) == {0, 1}
    assert eligible_calls(tiny_model("qwen3_5")) == {0, 1}


def test_a_draft_without_attention_to_the_whole_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(DEMO / "draft")
    model = tiny_model("gpt_oss", vocab_size=len(tokenizer.get_vocab()))
    windows = [RotatingKVCache(24) for _ in model.layers]
    monkeypatch.setattr(type(model), "make_cache", lambda _: copy.deepcopy(windows))
    monkeypatch.setattr(calibration, "_ITEMS", 1)
    monkeypatch.setattr(calibration, "_CHARACTERS", 300)
    with pytest.raises(SparseUnsupportedError, match="no attention layer of the draft sees the whole prompt"):
        find_heads(model, tokenizer, SCORING, SELECTION)


# --- a head that is written into weights -----------------------------------------------------------------------------


def planted(words: int, call: int) -> nn.Module:
    """Random layers, one of which has a head that looks from each token at the same tokens before it."""
    config = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3}
    model = tiny_model("llama", 7, vocab_size=words, head_dim=32, rope_theta=1e9, **config)
    mx.random.seed(11)
    model.model.embed_tokens.weight = mx.random.normal((words, 96))
    for number, layer in enumerate(model.layers):
        attention, size = layer.self_attn, 96
        flat = {name: 1e-3 * mx.random.normal((size, size)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        if number == call:
            # Features that turn slowly carry the word: their angle is the same everywhere.
            slow = [*range(7, 16), *range(23, 32)]
            mixed = mx.random.normal((len(slow), size)) / 4
            for name in ("q_proj", "k_proj"):
                flat[name][mx.array([32 + at for at in slow])] = 2.0 * mixed
        for name, weight in flat.items():
            getattr(attention, name).weight = weight
        layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 1e-3
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("call", [0, 2])
def test_a_head_that_is_written_into_the_weights_is_found(
    call: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(calibration, "_ITEMS", 4)
    monkeypatch.setattr(calibration, "_CHARACTERS", 1500)
    tokenizer = load(DEMO / "draft")
    progress: list[tuple[int, int]] = []
    model = planted(len(tokenizer.get_vocab()), call)
    found = find_heads(model, tokenizer, SCORING, SELECTION, lambda *done: progress.append(done))
    assert (found.heads[0].call, found.heads[0].head) == (call, 1)
    assert found.recall["needle"] > 0.8, found
    assert found.depth == (1 if call == 0 else 3)
    assert progress[:12] == [(number, 12) for number in range(1, 13)]
    assert found.probe is not None
    assert progress[12:36] == [(number, 64) for number in range(1, 25)]  # more if there is time
    assert [record.args for record in caplog.records if "calibrating" in record.message] == progress[2:12:3]


@pytest.mark.extended
def test_the_bundled_draft_finds_its_needles() -> None:
    pair = load_pair(DEMO / "target", DEMO / "draft")
    assert pair.draft is not None
    found = find_heads(full_draft_model(pair.draft), pair.tokenizer, SCORING, SELECTION)
    assert found.recall["needle"] == 1.0
    assert found.refusal is None


# --- items -----------------------------------------------------------------------------------------------------------


def items(**changes: Any) -> Iterator[CalibrationItem]:
    return calibration_items(**({"number": 4, "characters": 1500} | changes))


def test_items_hold_their_gold_once_and_are_the_same_every_time() -> None:
    found = list(items())
    kinds = Counter(item.kind for item in found)
    assert (kinds.keys(), kinds["paraphrase"], kinds.total()) == (set(KINDS), 4, 12)
    assert kinds["needle"] >= 4  # a text may have no sentence to copy
    assert all(item.document.count(item.gold) == 1 for item in found)
    assert all(1300 < len(item.document) < 1700 for item in found)
    assert found == list(items())
    assert not set(map(repr, found)) & set(map(repr, items(seed=1)))


def test_places_in_the_rendered_prompt() -> None:
    tokenizer = load(DEMO / "draft")
    for item in items():
        prompt, places = calibration._render(tokenizer, item)
        said = {name: tokenizer.decode(prompt[start:end].tolist()) for name, (start, end) in places.items()}
        assert said["question"].strip() == item.question
        assert item.gold.strip() in said["gold"] or said["gold"].strip() in item.gold
        assert len(said["gold"]) > len(item.gold) - 4
        assert said["document"][40:-40] in item.document
        assert len(said["document"]) > len(item.document) - 4
