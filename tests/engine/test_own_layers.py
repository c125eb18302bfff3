"""A draft that runs its first layers only: alone, and as the target's own layers inside the engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import (
    Engine,
    EngineConfig,
    GenerationRequest,
    ModelPair,
    ScoringConfig,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    SpeculationName,
    load_pair,
    make_pair,
)
from mlx_specprefill.adapters.depth import FirstLayers, first_layers
from mlx_specprefill.engine.reading.costs import CostModel
from mlx_specprefill.errors import SparseUnsupportedError
from mlx_specprefill.loading.footprint import weight_bytes
from mlx_specprefill.selection.scorer import PaperScorer, Scores
from tests.support.scoring import scoring_input
from tests.support.steps import finish
from tests.support.tiny import (
    CONFIGS,
    FAMILIES,
    VOCAB,
    generated,
    on_own_layers,
    random_prompt,
    save_checkpoint,
    tiny_model,
    tokenizer,
)

CONFIG = EngineConfig(policy=SpecPrefillPolicy(threshold=0, densify=False), prefill_step=32)
LAYERS = 2  # of three or four; one of them sees the whole prompt in every family


def truncated(family: str, whole: nn.Module) -> nn.Module:
    """A model that was built with so few layers, and has their weights."""
    config = copy.deepcopy(CONFIGS[family])
    text = config.get("text_config", config)
    count = text["num_hidden_layers"]
    text |= {key: value[:LAYERS] for key, value in text.items() if isinstance(value, list) and len(value) == count}
    text["num_hidden_layers"] = LAYERS
    model = tiny_model(family, **config)
    named = dict(nn.utils.tree_flatten(whole.parameters()))
    names = [name for name, _ in nn.utils.tree_flatten(model.parameters())]
    model.load_weights([(name, named[name]) for name in names])
    return model


def scored(draft: nn.Module, prompt: tuple[int, ...], config: ScoringConfig, cache: list[Any] | None = None) -> Scores:
    given = {} if cache is None else {"cache": cache}
    task = scoring_input(draft, prompt, config, **given)
    slices: Generator[Any, None, Scores] = PaperScorer(config).score(draft, task)
    return finish(slices)


def own_pair(family: str = "llama", count: int | None = LAYERS, target: nn.Module | None = None) -> ModelPair:
    config = {"max_position_embeddings": 4096, "vocab_size": VOCAB}
    pair = make_pair(target or tiny_model(family, 1), tokenizer(), config, draft="self")
    return pair if count is None else on_own_layers(pair, count)


def asked(length: int = 200, how: SpeculationName | None = None) -> GenerationRequest:
    return GenerationRequest(
        random_prompt(length), 12, specprefill=SpecPrefillOptions(enabled=True, speculative=how, return_spans=True)
    )


# --- scoring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("step", [200, 33])
def test_scores_are_those_of_a_model_that_has_no_more_layers(family: str, step: int) -> None:
    """Its row for the last prompt token; nothing is generated."""
    whole, prompt = tiny_model(family, 3), random_prompt(120, 4)
    ours = scored(first_layers(whole, LAYERS), prompt, ScoringConfig(prefill_step=step))
    theirs = scored(truncated(family, whole), prompt, ScoringConfig(rows=1, prefill_step=step))
    assert np.array_equal(ours.importance, theirs.importance)
    assert (ours.lookahead, ours.words) == ((), theirs.words)
    lengths = {int(part.offset) for part in ours.cache if hasattr(part, "offset")}
    assert lengths == {120}


def test_a_cached_beginning_does_not_change_the_scores() -> None:
    shallow, prompt = first_layers(tiny_model("llama", 3), LAYERS), random_prompt(120, 4)
    cache = make_prompt_cache(shallow)
    scored(shallow, prompt[:60], ScoringConfig(), cache)
    again = scored(shallow, prompt, ScoringConfig(), cache)
    assert np.allclose(again.importance, scored(shallow, prompt, ScoringConfig()).importance, atol=1e-6)


# --- inside the engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_scores_for_itself(family: str) -> None:
    """The first layers of another copy select the same tokens, and the answer is that of these tokens alone."""
    pair = own_pair(family)
    assert pair.sparse_refusal is None
    whole = tiny_model(family, 1)
    other = replace(pair, target=whole, draft=truncated(family, whole))
    with Engine(pair, CONFIG) as engine:
        tokens, last = generated(engine.generate(asked()))
        again, _ = generated(engine.generate(asked()))
    with Engine(other, replace(CONFIG, scoring=ScoringConfig(rows=1))) as engine:
        expected, reference = generated(engine.generate(asked()))
    assert (last.report.mode, reference.report.mode) == ("sparse", "sparse")
    assert last.report.kept_spans is not None
    assert last.report.kept_spans == reference.report.kept_spans
    assert tokens == again == expected


def test_dense_answers_are_those_of_the_target_alone() -> None:
    request = replace(asked(), specprefill=SpecPrefillOptions(enabled=False))
    pair = own_pair()
    with Engine(pair, CONFIG) as engine:
        generated(engine.generate(asked()))
        tokens, _ = generated(engine.generate(request))
    with Engine(replace(pair, draft=None, draft_id=None), CONFIG) as engine:
        assert generated(engine.generate(request))[0] == tokens


@pytest.mark.parametrize("how", ["draft", "triforce"])
def test_it_drafts_no_answers(how: SpeculationName) -> None:
    with Engine(own_pair(), CONFIG) as engine:
        _, last = generated(engine.generate(asked(how=how)))
    assert last.report.mode == "sparse"
    assert last.report.speculation.strategy == "autoregressive"
    assert "first 2 layers only" in last.report.speculation.reason


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_shared_weights_are_counted_once() -> None:
    pair = own_pair()
    assert isinstance(pair.draft, FirstLayers)
    assert weight_bytes(pair.draft, pair.target) == 0
    with Engine(pair, CONFIG) as engine:
        generated(engine.generate(asked()))
        memory = engine.stats().memory
    assert (memory.target_weights, memory.draft_weights) == (weight_bytes(pair.target), 0)


def test_layers_of_another_model_that_do_not_run_are_counted_all_the_same() -> None:
    target, draft = tiny_model("llama", 1), tiny_model("llama", 2)
    pair = make_pair(target, tokenizer(), {}, draft=first_layers(draft, 1), draft_config={})
    assert isinstance(pair.draft, FirstLayers)
    assert weight_bytes(pair.draft, target) == weight_bytes(draft)


def test_costs_are_kept_per_depth(tmp_path: Path) -> None:
    config = replace(CONFIG, calibration_file=tmp_path / "costs.json")
    target = tiny_model("llama", 1)
    for count in (1, 2):
        costs = CostModel(own_pair(count=count, target=target), config)
        costs.observe("draft", 100, 0, 10.0 * count)
        costs.store()
    assert len(json.loads((tmp_path / "costs.json").read_text())) == 2
    again = CostModel(own_pair(count=2, target=target), config)
    again.load()
    assert again.cost("draft") == costs.cost("draft")


# --- loading ---------------------------------------------------------------------------------------------------------


def test_from_a_checkpoint(tmp_path: Path) -> None:
    where = save_checkpoint(tmp_path / "m", "gpt_oss", 1)
    pair = on_own_layers(load_pair(where), 3)
    assert isinstance(pair.draft, FirstLayers)
    assert pair.draft.whole is pair.target
    assert (pair.draft.count, pair.sparse_refusal) == (3, None)
    assert pair.draft_context == pair.context_length


@pytest.mark.parametrize("count", [None, 3])
def test_all_of_its_layers_look_ahead(count: int | None) -> None:
    pair = own_pair(count=count)
    assert pair.draft is pair.target
    with Engine(pair, CONFIG) as engine:
        _, last = generated(engine.generate(asked()))
        assert engine.stats().memory.draft_weights == 0
    assert last.report.mode == "sparse"


@pytest.mark.parametrize(
    ("family", "count", "error", "words"),
    [
        ("llama", 0, ValueError, "it has 3 layers"),
        ("llama", 4, ValueError, "it has 3 layers"),
        ("gpt_oss", 1, SparseUnsupportedError, "it takes 2"),
    ],
)
def test_depths_that_can_not_be(family: str, count: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        first_layers(tiny_model(family), count)
