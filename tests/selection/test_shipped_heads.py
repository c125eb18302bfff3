"""Heads that come with the library are found by the weights, in any dtype and packing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_specprefill import load_pair
from mlx_specprefill.selection import heads as shipped
from mlx_specprefill.selection.heads import DraftHeads, Head
from tests.support.tiny import save_checkpoint, tiny_model

HEADS = DraftHeads((Head(1, 3, 0.5),), 2, 3, {"copy": 1.0})


def trained(seed: int, dtype: mx.Dtype = mx.bfloat16) -> nn.Module:
    """A tiny model with norms as training leaves them, in a checkpoint of this dtype."""
    model = tiny_model("llama", seed)
    mx.random.seed(seed)
    norms = [(name, array) for name, array in tree_flatten(model.parameters()) if name.endswith("norm.weight")]
    noisy = [(name, (array + mx.random.normal(array.shape)).astype(dtype)) for name, array in norms]
    model.load_weights([(name, array.astype(mx.float32)) for name, array in noisy], strict=False)
    return model


def fits(name: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


CASTS: dict[str, Callable[[nn.Module], object]] = {
    "bfloat16": lambda model: model.set_dtype(mx.bfloat16),
    "float16": lambda model: model.set_dtype(mx.float16),
    "4 bits": lambda model: nn.quantize(model, 32, 4, class_predicate=fits),
}


@pytest.mark.parametrize("cast", CASTS)
def test_a_fingerprint_outlives_quantisation(cast: str) -> None:
    model = trained(1, mx.float32 if cast == "bfloat16" else mx.bfloat16)
    before = shipped.fingerprint(model)
    CASTS[cast](model)
    assert shipped.fingerprint(model) == before
    assert shipped.fingerprint(trained(2)) != before


def test_a_known_draft_needs_no_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = (save_checkpoint(tmp_path / name, "llama", seed) for name, seed in (("t", 1), ("d", 2)))
    key = shipped.fingerprint(load_pair(draft).target)
    file = tmp_path / "shipped.json"
    file.write_text(json.dumps({key: {"model": "d", **HEADS.to_dict()}}))
    monkeypatch.setattr(shipped, "SHIPPED_HEADS", file)
    pair = load_pair(target, draft)
    assert (pair.heads, pair.draft_id) == (HEADS, "d (2 of 3 layers)")
    file.write_text("{}")
    assert load_pair(target, draft).heads is None


def test_what_is_shipped_can_be_read() -> None:
    entries = json.loads(shipped.SHIPPED_HEADS.read_text()).values()
    assert entries
    for entry in entries:
        assert DraftHeads.from_dict(entry).refusal is None
