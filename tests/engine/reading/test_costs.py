"""The learnt cost of a forward, against machines whose law is known."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest

from mlx_specprefill import Engine, EngineConfig, Finished, GenerationRequest, SpecPrefillPolicy
from mlx_specprefill.config import DraftWindow
from mlx_specprefill.engine.reading.costs import CostModel, ForwardCost, LearntCost, prior_cost
from mlx_specprefill.pair import with_heads
from mlx_specprefill.selection.heads import DraftHeads, Head
from tests.support import tiny

# Fitted to published prefill times, milliseconds; how attention grows with depth is a guess. See docs/decisions/0009.
MACHINES = {
    "122B-A10B, M2 Ultra": ForwardCost(840, 5.2, 2e-5),
    "122B-A10B with a smaller fixed part": ForwardCost(400, 5.2, 2e-5),
    "35B-A3B, M4 Max": ForwardCost(60, 0.55, 5e-6),
    "35B-A3B, M2 Ultra": ForwardCost(250, 2.47, 1e-5),
    "30B-A3B, M1 Pro": ForwardCost(520, 3.7, 3e-5),
    "27B dense, M2 Max": ForwardCost(50, 8.4, 5e-5),
}
Load = Callable[[int, random.Random], float]
LOADS: dict[str, Load] = {
    "idle": lambda request, rng: 1 + 0.02 * rng.random(),
    "busy from the tenth to the twentieth request": lambda request, rng: 2.0 if 10 <= request < 20 else 1.0,
    "twice as slow from the tenth on": lambda request, rng: 2.0 if request >= 10 else 1.0,
}


def forwards_of(tokens: int, step: int) -> list[tuple[int, int]]:
    """Return (tokens, depth) of each forward of a prompt, as `prefill` makes them."""
    found, depth, last = [], 0, tokens - 32 if tokens > 64 else 0
    while depth < last:
        found.append((min(step, last - depth), depth))
        depth += found[-1][0]
    return [*found, (tokens - depth, depth)]


def test_the_time_of_a_prefill_is_the_sum_of_its_forwards():
    law = MACHINES["30B-A3B, M1 Pro"]
    for tokens in (1, 64, 65, 300, 2048, 2081, 16384):
        for step in (64, 256, 2048):
            by_hand = sum(law.ms(*forward) for forward in forwards_of(tokens, step))
            assert law.prefill_ms(tokens, 0, step) == pytest.approx(by_hand)
    assert law.prefill_ms(0, 100, 2048) == 0


@pytest.mark.parametrize("depth", [0, 5000, 60000])
@pytest.mark.parametrize("machine", MACHINES)
def test_what_fits_a_time_is_the_largest_that_does(machine, depth):
    law = MACHINES[machine]
    for ms in (1.0, 200.0, 3000.0):
        found = law.most_tokens(ms, depth)
        assert found == 0 or law.ms(found, depth) <= ms * (1 + 1e-6)
        assert law.ms(found + 1, depth) > ms


def test_what_loses_a_share_to_the_fixed_part_is_the_smallest_that_loses_no_more():
    law = ForwardCost(400, 7, 0)
    for share in (0.05, 1 / 3, 0.5):
        found = law.fewest_tokens(share, 0)
        assert law.fixed / law.ms(found) <= share + 1e-9
        assert law.fixed / law.ms(found - 1) > share


@pytest.mark.parametrize("error", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("machine", MACHINES)
def test_ten_requests_after_a_change_predictions_are_within_a_fifth(machine, load, error):
    """However wrong the prior was, and also when load comes and goes."""
    law, rng = MACHINES[machine], random.Random(machine)
    learnt = LearntCost(ForwardCost(50 * error, error * law.token, 0.2 * error * law.pair))
    for request in range(40):
        tokens, step = rng.choice([300, 900, 2000, 4000, 9000, 16000]), rng.choice([192, 2048, 2048])
        slowness = LOADS[load](request, rng)
        took = sum(law.ms(*forward) for forward in forwards_of(tokens, step)) * slowness
        predicted = learnt.cost.prefill_ms(tokens, 0, step)
        if request in range(10, 40) and request not in (*range(10, 20), *range(20, 30)):
            assert predicted == pytest.approx(took, rel=0.2)
        for forward in forwards_of(tokens, step):
            learnt.observe(*forward, law.ms(*forward) * slowness)


@pytest.mark.extended
@pytest.mark.parametrize("machine", MACHINES)
def test_a_busy_machine_does_not_move_the_fit(machine):
    """A third of the forwards takes three times as long: the others say what a forward costs."""
    law, rng = MACHINES[machine], random.Random(0)
    learnt = LearntCost(law.scale(0.2))
    for _ in range(30):
        for forward in forwards_of(rng.choice([300, 2000, 9000]), rng.choice([256, 2048])):
            learnt.observe(*forward, law.ms(*forward) * rng.choice([1.0, 1.0, 3.0]))
    for tokens, depth in ((64, 0), (2048, 0), (2048, 8192)):
        assert learnt.cost.ms(tokens, depth) == pytest.approx(law.ms(tokens, depth), rel=0.2)


def test_a_stored_cost_that_is_nonsense_heals():
    """A machine that was busy while it was measured once stored 888 ms per forward and nothing per token."""
    law, learnt = ForwardCost(10, 2, 1e-4), LearntCost(ForwardCost(888, 0, 0))
    for tokens in (600, 1500, 4000):
        for forward in forwards_of(tokens, 2048):
            learnt.observe(*forward, law.ms(*forward))
    assert learnt.cost.prefill_ms(8000, 0, 2048) == pytest.approx(law.prefill_ms(8000, 0, 2048), rel=0.2)


def test_next_to_no_tokens_and_no_time_say_nothing():
    learnt = LearntCost(ForwardCost(1, 1, 0))
    for tokens, ms in ((1, 500.0), (7, 500.0), (100, 0.0)):
        learnt.observe(tokens, 0, ms)
    assert learnt.count == 0
    assert learnt.cost == ForwardCost(1, 1, 0)


# --- of a pair -------------------------------------------------------------------------------------------------------


def config(file: Path | None = None) -> EngineConfig:
    return EngineConfig(policy=SpecPrefillPolicy(threshold=None), calibration_file=file)


def test_what_never_ran_is_as_slow_as_what_did():
    """The first prompt is read by the draft: the target's prior misses this machine by as much."""
    costs = CostModel(tiny.tiny_pair(), config())
    before, draft = costs.cost("target"), costs.cost("draft")
    for _ in range(5):
        costs.observe("draft", 200, 0, 7 * draft.ms(200))
    assert costs.cost("target").ms(1000) == pytest.approx(7 * before.ms(1000), rel=1e-6)
    costs.observe("target", 200, 0, 3 * before.ms(200))
    assert costs.cost("target").ms(200) == pytest.approx(3 * before.ms(200), rel=0.01)


def test_costs_outlive_the_process_by_model_and_machine(tmp_path):
    file, law = tmp_path / "new" / "costs.json", ForwardCost(5, 0.5, 1e-4)
    first = CostModel(tiny.tiny_pair(), config(file))
    for tokens in (100, 400, 800):
        for forward in forwards_of(tokens, 256):
            first.observe("target", *forward, law.ms(*forward))
    first.store()
    again, other = CostModel(tiny.tiny_pair(), config(file)), CostModel(tiny.tiny_pair("qwen3"), config(file))
    unknown = other.cost("target")
    for costs in (again, other):
        costs.load()
    assert again.cost("target") == first.cost("target")
    assert other.cost("target") == unknown


def test_a_kind_that_never_ran_is_as_slow_as_those_that_were_estimated() -> None:
    """The time of a selection has no estimate, so it says nothing of the machine."""
    pair = tiny.tiny_pair()
    model, prior = CostModel(pair, EngineConfig()), prior_cost(pair.target, pair.target_config)
    expected = model.cost("draft").scale(3)
    model.observe("target", 100, 0, 3 * prior.ms(100))
    model.observe("select", 6000, 0, 100.0)
    assert model.cost("draft") == expected


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"K": 3}', '{"K": {"target": [1, "a", 2]}}', '{"K": {"target": [-1, 2, 3]}}']
)
def test_a_file_with_something_else_counts_as_empty(tmp_path, content):
    file = tmp_path / "costs.json"
    costs = CostModel(tiny.tiny_pair(), config(file))
    file.write_text(content.replace("K", costs._key))
    before = costs.cost("target")
    costs.load()
    assert costs.cost("target") == before
    costs.observe("target", 100, 0, 5.0)
    costs.store()
    assert costs._key in json.loads(file.read_text())


def test_an_engine_stores_what_its_requests_took(tmp_path):
    file = tmp_path / "costs.json"
    with Engine(tiny.tiny_pair(), config(file)) as engine:
        request = GenerationRequest(tiny.random_prompt(200), 1)
        *_, end = engine.generate(request)
        assert isinstance(end, Finished)
        assert end.report.predicted is not None
    (stored,) = json.loads(file.read_text()).values()
    assert "target" in stored


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_5", "nemotron_h", "gpt_oss"])
def test_every_family_has_a_prior(architecture):
    model = tiny.tiny_model(architecture)
    prior = prior_cost(model, {"num_attention_heads": 4, "head_dim": 8, "num_experts_per_tok": 2})
    assert prior.token > 0
    assert prior.fixed > 0
    assert prior.fixed / prior.token == (150 if architecture in ("gpt_oss",) else 16)


def test_a_prior_counts_packed_weights_as_what_they_stand_for():
    class Model(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer, self.layers = layer, list[Any]()

    linear = nn.Linear(64, 96, bias=False)
    for packed in (linear, linear.to_quantized(group_size=32, bits=4), linear.to_quantized(group_size=32, bits=5)):
        assert prior_cost(Model(packed), {}).token == 2 * 64 * 96 / 5e7


def test_the_output_projection_is_no_cost_of_a_prompts_token() -> None:
    small, large = (tiny.tiny_model("llama", vocab_size=size) for size in (96, 9600))
    assert prior_cost(small, {}) == prior_cost(large, {})


def test_a_draft_that_reads_within_a_window_is_predicted_to_take_linear_time() -> None:
    """It sees as many keys as its blocks do: those of the first tokens, of the window, and half of their own."""
    heads = DraftHeads((Head(0, 0, 1.0),), 3, 3, {})
    pair = with_heads(tiny.tiny_pair(), heads, exit_early=False)
    dense, cut = (CostModel(of, EngineConfig()).cost("draft") for of in (tiny.tiny_pair(), pair))
    assert cut.prefill_ms(65536, 0, 2048) <= 9 * cut.prefill_ms(8192, 0, 2048)
    assert dense.prefill_ms(65536, 0, 2048) > 30 * dense.prefill_ms(8192, 0, 2048)
    window = DraftWindow()
    seen = np.mean([window.sinks + window.tokens + 1 + index % window.block for index in range(2048, 8192)])
    assert cut.token == pytest.approx(dense.token + dense.pair * seen, rel=1e-3)
