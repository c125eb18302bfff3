"""When a long addition to a session is selected from instead of read whole."""

from __future__ import annotations

import dataclasses

import pytest

from mlx_specprefill import EngineConfig, PairCost, SpecPrefillPolicy
from mlx_specprefill.engine.admission.cost import ModelCost
from mlx_specprefill.engine.admission.planner import Costs, Planner
from tests.tiny import tiny_pair

SLOW = ModelCost(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1)  # a millisecond per token
FAST = dataclasses.replace(SLOW, token_ms=0.01)
MEASURED = EngineConfig(policy=SpecPrefillPolicy(threshold=None))


def planner(target: ModelCost | None, config: EngineConfig = MEASURED) -> Planner:
    pair = tiny_pair()
    costs = Costs(pair, config)
    costs.measured = None if target is None else PairCost(target, FAST, 512, 512)
    return Planner(pair, config, costs, lambda _: 512)


@pytest.mark.parametrize(
    ("target", "new", "wanted", "selects"),
    [
        (SLOW, 3000, 600, True),  # saves 2.4 s
        (SLOW, 3000, 2600, False),  # saves .4 s, less than a fifth and less than a second
        (SLOW, 900, 100, False),
        (FAST, 20_000, 4000, False),  # saves .16 s, though it is long
        (None, 8192, 1600, False),  # nothing was measured
        (None, 8193, 1600, True),
    ],
)
def test_what_was_measured_decides(target: ModelCost | None, new: int, wanted: int, selects: bool) -> None:
    assert planner(target).selects(new, wanted, 1000) == selects


def test_a_fixed_threshold_is_one_for_additions_too() -> None:
    config = EngineConfig(policy=SpecPrefillPolicy(threshold=100))
    assert planner(None, config).selects(101, 20, 1000)
    assert not planner(None, config).selects(100, 20, 1000)
