"""A target without a draft: its own first layers score, where it can be prefilled in stages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from mlx_specprefill import Engine, GenerationRequest, SpecPrefillOptions
from mlx_specprefill.adapters.heads import DraftHeads, Head
from mlx_specprefill.adapters.staged import UpperLayers
from mlx_specprefill_server import cli
from mlx_specprefill_server.cli.common import choose
from mlx_specprefill_server.cli.options import PairOptions
from mlx_specprefill_server.pair_loading import load
from mlx_specprefill_server.pair_settings import make_settings
from mlx_specprefill_server.pairs import Pair
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


def test_a_target_alone_is_prefilled_in_stages(tmp_path: Path) -> None:
    pair = load(Pair(target=checkpoint(tmp_path, 2)), "auto")
    assert pair.stages.count == 2
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
    assert load(chosen, "auto", settings).stages is not None


@pytest.mark.parametrize("depth", [None, 3])
def test_without_layers_that_score_it_is_the_target_alone(tmp_path: Path, depth: int | None) -> None:
    """Nothing is calibrated, or its heads take all layers: then nothing is gained."""
    pair = load(Pair(target=checkpoint(tmp_path, depth)), "auto")
    assert (pair.draft, pair.draft_id, pair.heads) == (None, None, None)
    assert pair.sparse_refusal is not None
    assert "no draft model is loaded" in pair.sparse_refusal


def test_a_target_that_can_not_be_split_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The check of its two parts fails: the log has the reason, and so has every request's report."""
    original = UpperLayers.__call__

    def turned(self: UpperLayers, inputs: mx.array, hidden: mx.array, cache: Sequence[Any]) -> mx.array:
        return original(self, inputs, hidden[:, ::-1], cache)

    monkeypatch.setattr(UpperLayers, "__call__", turned)
    pair = load(Pair(target=checkpoint(tmp_path, 2)), "auto")
    reason = "its layers in two parts differ from the model"
    assert f"full prefill only: no draft model is loaded, and the target can't do without: {reason}" in caplog.text
    with Engine(pair, make_settings(Pair(target=""), prefix_cache_size=0).engine_config()) as engine:
        _, last = generated(engine.generate(GenerationRequest(PROMPT, 4, specprefill=SpecPrefillOptions(True))))
    assert (last.report.mode, last.report.reason_code) == ("full", "no-draft")
    assert reason in last.report.reason


def test_a_pair_keeps_its_draft_unless_it_is_told_not_to(tmp_path: Path) -> None:
    target, draft = checkpoint(tmp_path, 2), checkpoint(tmp_path / "draft", None)
    assert load(Pair(target=target, draft=draft), "auto").stages is None
    file = tmp_path / "pairs.toml"
    file.write_text(f'[mine]\ntarget = "{target}"\ndraft = "{draft}"\n')
    assert choose(PairOptions("mine", file)).draft == draft
    alone = choose(PairOptions("mine", file, draft="self"))
    assert (alone.draft, alone.target) == ("self", target)
    assert load(alone, "auto").stages is not None


@pytest.mark.extended
@pytest.mark.parametrize(("options", "prefill"), [([], "staged"), (["--not-staged"], "whole")])
def test_the_suite_measures_both_ways(tmp_path: Path, options: list[str], prefill: str) -> None:
    target = tmp_path / "target"
    shutil.copytree(DEMO / "target", target)
    layers = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    heads = DraftHeads((Head(1, 0, 1.0),), 2, layers, {"copy": 1.0})
    (target / "heads.json").write_text(json.dumps(heads.to_dict()))
    own = ["--target", str(target), "--draft", "self"]
    size = ["--task", "needle", "--length", "512", "-n", "1", "--arm", "sparse", "--out", str(tmp_path)]
    done = CliRunner().invoke(cli.app, ["eval", *own, *size, *options])
    assert done.exit_code == 0, done.output
    run, item = map(json.loads, (tmp_path / "items.jsonl").read_text(encoding="utf-8").splitlines())
    assert run["run"]["prefill"] == prefill
    assert "sparse@0.2" in item["arms"]
