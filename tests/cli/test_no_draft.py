"""A target without a draft: its own first layers score, where some of them are enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_specprefill import Engine, GenerationRequest, SpecPrefillOptions
from mlx_specprefill.adapters.depth import layers_of
from mlx_specprefill.selection.heads import DraftHeads, Head
from mlx_specprefill_server.cli.common import choose
from mlx_specprefill_server.cli.options import PairOptions
from mlx_specprefill_server.pair_loading import load
from mlx_specprefill_server.pairs import Pair
from mlx_specprefill_server.settings.pair import make_settings
from tests.support.tiny import generated, random_prompt, save_checkpoint

DEMO = Path(__file__).parents[2] / "models" / "demo"
PROMPT = random_prompt(200)


def checkpoint(folder: Path, depth: int | None, family: str = "llama") -> str:
    """A target of three layers, with calibrated heads in the first `depth` of them."""
    target = save_checkpoint(folder / f"{family}-{depth}", family)
    if depth is not None:
        heads = DraftHeads((Head(depth - 1, 0, 1.0),), depth, 3, {"copy": 1.0})
        (target / "heads.json").write_text(json.dumps(heads.to_dict()))
    return str(target)


def test_the_first_layers_of_a_target_alone_score(tmp_path: Path) -> None:
    pair = load(Pair(target=checkpoint(tmp_path, 2)), "auto")
    assert pair.scores_itself
    assert len(layers_of(pair.draft)) == 2
    assert pair.sparse_refusal is None
    settings = make_settings(Pair(target=""), specprefill_threshold=0, prefix_cache_size=0)
    with Engine(pair, settings.engine_config()) as engine:
        request = GenerationRequest(PROMPT, 4, specprefill=SpecPrefillOptions(True))
        _, last = generated(engine.generate(request))
    assert (last.report.mode, last.report.scorer) == ("sparse", "self")


@pytest.mark.parametrize("speculative", ["off", "draft"])
def test_speculation_does_not_ask_for_the_layers_that_propose_nothing(tmp_path: Path, speculative: str) -> None:
    chosen = Pair(target=checkpoint(tmp_path, 2))
    settings = make_settings(chosen, specprefill_threshold=0, speculative=speculative)
    assert load(chosen, "auto", settings).scores_itself


@pytest.mark.parametrize("depth", [None, 3])
def test_without_layers_that_score_it_is_the_target_alone(tmp_path: Path, depth: int | None) -> None:
    """Nothing is calibrated, or its heads take all layers: then nothing is gained."""
    pair = load(Pair(target=checkpoint(tmp_path, depth)), "auto")
    assert (pair.draft, pair.draft_id, pair.heads) == (None, None, None)
    assert pair.sparse_refusal is not None
    assert "no draft model is loaded" in pair.sparse_refusal


def test_a_pair_keeps_its_draft_unless_it_is_told_not_to(tmp_path: Path) -> None:
    target, draft = checkpoint(tmp_path, 2), checkpoint(tmp_path / "draft", None)
    assert not load(Pair(target=target, draft=draft), "auto").scores_itself
    file = tmp_path / "pairs.toml"
    file.write_text(f'[mine]\ntarget = "{target}"\ndraft = "{draft}"\n')
    assert choose(PairOptions("mine", file)).draft == draft
    alone = choose(PairOptions("mine", file, draft="self"))
    assert (alone.draft, alone.target) == ("self", target)
    assert load(alone, "auto").scores_itself
