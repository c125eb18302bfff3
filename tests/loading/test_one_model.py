"""Models come into memory piece by piece, and those that several pairs name come once."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    GenerationRequest,
    LoadedModels,
    LoadError,
    ModelPair,
    SpecPrefillOptions,
    load_pair,
)
from mlx_specprefill.config import keep_pct
from mlx_specprefill.loading import pieces
from tests.support.tiny import generated, random_prompt, save_checkpoint


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two targets and a draft."""
    return (
        save_checkpoint(tmp_path / "first", "llama", seed=1),
        save_checkpoint(tmp_path / "second", "qwen3", seed=2),
        save_checkpoint(tmp_path / "draft", "llama", seed=3),
    )


def test_progress_is_told_piece_by_piece(checkpoints: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_PIECE", 10_000)
    told: list[tuple[int, int]] = []
    load_pair(checkpoints[0], on_progress=lambda done, total: told.append((done, total)))
    assert len(told) > 3
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (told[0][1],) * 2


@pytest.mark.extended
def test_what_progress_raises_ends_the_loading_and_leaves_nothing(
    checkpoints: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_PIECE", 10_000)
    gc.collect()
    before = mx.get_active_memory()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_pair(checkpoints[0], on_progress=stop)
    gc.collect()
    assert mx.get_active_memory() == before


def test_weights_that_are_cut_off_are_a_load_error(checkpoints: tuple[Path, ...]) -> None:
    weights = checkpoints[0] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(LoadError, match="first"):
        load_pair(checkpoints[0])


def answer(pair: ModelPair) -> list[int]:
    request = GenerationRequest(random_prompt(400), 10, specprefill=SpecPrefillOptions(True, keep_pct("0.3")))
    with Engine(pair, EngineConfig()) as engine:
        return generated(engine.generate(request))[0]


@pytest.mark.extended
def test_two_pairs_have_one_draft_and_answer_as_with_two(checkpoints: tuple[Path, ...]) -> None:
    first, second, draft = checkpoints
    expected = [answer(load_pair(target, draft)) for target in (first, second)]
    loaded, reads = LoadedModels(), []
    pairs = [
        load_pair(target, draft, loaded=loaded, on_progress=lambda done, total: reads.append(done == total))
        for target in (first, second)
    ]
    assert reads.count(True) == 3
    assert pairs[0].draft is pairs[1].draft
    assert pairs[0].target is not pairs[1].target
    assert [answer(pair) for pair in pairs] == expected


@pytest.mark.extended
def test_a_shared_model_goes_with_the_last_pair_that_has_it(checkpoints: tuple[Path, ...]) -> None:
    first, second, draft = checkpoints
    loaded = LoadedModels()
    gc.collect()
    before = mx.get_active_memory()
    pairs = [load_pair(target, draft, loaded=loaded) for target in (first, second)]
    gone = weakref.ref(pairs[0].draft)
    pairs.pop(0)
    gc.collect()
    assert gone() is pairs[0].draft
    pairs.clear()
    gc.collect()
    assert gone() is None
    assert mx.get_active_memory() == before
    again = load_pair(first, draft, loaded=loaded)
    assert again.draft is not None


def test_another_dtype_is_another_model(checkpoints: tuple[Path, ...]) -> None:
    loaded = LoadedModels()
    pairs = [load_pair(checkpoints[0], checkpoints[2], dtype=dtype, loaded=loaded) for dtype in ("float32", "bfloat16")]
    assert pairs[0].draft is not pairs[1].draft
