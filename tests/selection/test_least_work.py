"""The draft computes no product that neither later tokens nor the chosen heads need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_specprefill import ScoringConfig
from mlx_specprefill.adapters.depth import first_layers
from mlx_specprefill.config import DraftWindow
from mlx_specprefill.selection.heads import DraftHeads, Head
from mlx_specprefill.selection.scorer import HeadScorer
from tests.support.scoring import scoring_input
from tests.support.steps import finish
from tests.support.tiny import random_prompt, tiny_model

LAYER, KEYS = 7 + 2, 2  # products of a whole layer: projections and attention; of one whose keys alone are needed
ASKING = 1 + 1  # of the layer with the chosen head: queries, and their products with the keys
WINDOW = DraftWindow(tokens=16, sinks=4, block=32)


class Products:
    """Counts the matrix products in each graph that is evaluated."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.counts: list[int] = []
        self.asking: list[int] = []
        self._file = folder / "graph.dot"
        evaluate = mx.eval

        def counting(*wanted: Any) -> None:
            self.counts.append(self._count(wanted))
            evaluate(*wanted)

        patch.setattr(mx, "eval", counting)
        importance = HeadScorer._importance

        def counting_rows(scorer: HeadScorer, parts: Any) -> Any:
            self.asking.append(self._count([row for rows, _ in parts for row in rows.values()]))
            return importance(scorer, parts)

        patch.setattr(HeadScorer, "_importance", counting_rows)

    def _count(self, wanted: Any) -> int:
        arrays = [array for _, array in tree_flatten(wanted) if isinstance(array, mx.array)]
        mx.export_to_dot(str(self._file), *arrays)
        return self._file.read_text().count('"Matmul"')


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_draft_computes_the_keys_of_its_last_layer_and_nothing_behind(
    family: str, depth: int, window: DraftWindow | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one head in the last of its layers: no MLP, no output and, where nothing asks, no attention there."""
    draft = first_layers(tiny_model(family), depth)
    heads, config = DraftHeads((Head(depth - 1, 1, 1.0),), depth, 3, {}), ScoringConfig()
    task = scoring_input(draft, random_prompt(96 + 16), config, step=lambda: 32, window=window)
    products = Products(tmp_path, monkeypatch)
    finish(HeadScorer(heads, config).score(draft, task))
    assert products.counts == [(depth - 1) * LAYER + KEYS] * 4
    assert products.asking == [ASKING]
