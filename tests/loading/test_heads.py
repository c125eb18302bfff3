"""A pair with calibrated heads of its draft."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlx_specprefill import LoadError, ModelPair, load_pair
from mlx_specprefill.adapters.depth import FirstLayers, first_layers
from mlx_specprefill.pair import with_heads
from mlx_specprefill.selection.heads import DraftHeads, Head, LineProbe
from tests.support.tiny import save_checkpoint, tiny_pair, values_of

HEADS = DraftHeads((Head(1, 3, 0.5), Head(0, 0, 0.25)), 2, 3, {"copy": 1.0})


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A target and a draft that has calibrated heads."""
    target, draft = save_checkpoint(tmp_path / "target", "llama", 1), save_checkpoint(tmp_path / "draft", "llama", 2)
    (draft / "heads.json").write_text(json.dumps(HEADS.to_dict()))
    return target, draft


def runs(pair: ModelPair) -> int:
    assert pair.draft is not None
    return len(pair.draft.layers) if not isinstance(pair.draft, FirstLayers) else pair.draft.count


def test_heads_lie_beside_the_draft(folders: tuple[Path, Path]) -> None:
    """And end it after the last of them."""
    pair = load_pair(*folders)
    assert (pair.heads, runs(pair), pair.draft_id) == (HEADS, 2, "draft (2 of 3 layers)")
    assert pair.sparse_refusal is None


def test_given_heads_come_first(folders: tuple[Path, Path]) -> None:
    other = replace(HEADS, depth=1, heads=HEADS.heads[1:])
    pair = load_pair(*folders, heads=other)
    assert (pair.heads, runs(pair)) == (other, 1)


def test_a_target_that_scores_for_itself_has_heads_of_its_own(folders: tuple[Path, Path]) -> None:
    pair = load_pair(folders[1], "self")
    assert (pair.heads, runs(pair)) == (HEADS, 2)
    assert isinstance(pair.draft, FirstLayers)
    assert pair.draft.whole is pair.target


def test_without_a_draft_a_models_own_heads_say_nothing(folders: tuple[Path, Path]) -> None:
    assert load_pair(folders[1]).heads is None
    with pytest.raises(LoadError, match="there is no draft"):
        load_pair(folders[1], heads=HEADS)


def test_a_draft_that_goes_on_after_its_heads() -> None:
    pair = tiny_pair()
    kept = with_heads(pair, HEADS, exit_early=False)
    assert kept.draft is pair.draft
    assert (kept.heads, kept.draft_id) == (HEADS, "draft")
    whole = with_heads(pair, replace(HEADS, depth=3))
    assert (whole.draft, whole.draft_id) == (pair.draft, "draft")


@pytest.mark.parametrize("layers", [2, 4])
def test_heads_of_another_model_are_refused(layers: int) -> None:
    with pytest.raises(LoadError, match=f"a draft with {layers} layers; draft has 3"):
        with_heads(tiny_pair(), replace(HEADS, layers=layers))


def test_heads_in_layers_that_do_not_run_are_refused() -> None:
    pair = tiny_pair()
    with pytest.raises(LoadError, match="need 2 layers of the draft, which runs 1"):
        with_heads(replace(pair, draft=first_layers(pair.draft, 1)), HEADS)


def test_a_draft_that_does_not_find_answers_is_refused_for_sparse_prefill() -> None:
    blind = replace(HEADS, recall={"copy": 0.1})
    assert with_heads(tiny_pair(), blind).sparse_refusal == blind.refusal
    already = replace(tiny_pair(), sparse_refusal="another reason")
    assert with_heads(already, blind).sparse_refusal == "another reason"


def test_a_broken_file_beside_the_draft_is_refused(folders: tuple[Path, Path]) -> None:
    (folders[1] / "heads.json").write_text("{}")
    with pytest.raises(LoadError, match=r"heads\.json: no calibrated heads"):
        load_pair(*folders)


@pytest.mark.parametrize(("caches", "weights"), [((0, 1), 1), ((0,), 2), ((0, 2), 2), ((1, 0), 2)])
def test_a_probe_of_another_draft_is_refused(caches: tuple[int, ...], weights: int) -> None:
    """One that reads caches which the draft has not, or of another size; of two layers, the first two caches are."""
    draft = tiny_pair().draft
    assert draft is not None
    size = 2 * weights * values_of(draft)
    heads = replace(HEADS, probe=LineProbe(caches, np.ones(size, np.float16).tobytes()))
    if sorted(caches) == [0, 1] and weights == len(caches):
        assert with_heads(tiny_pair(), heads).heads == heads
        return
    with pytest.raises(LoadError, match="probe beside the calibrated heads was fitted on another draft"):
        with_heads(tiny_pair(), heads)
