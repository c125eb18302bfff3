"""When a long addition to a session is selected from instead of read whole."""

from __future__ import annotations

import pytest

from mlx_specprefill import EngineConfig, SpecPrefillPolicy
from mlx_specprefill.engine.admission.planner import Planner
from mlx_specprefill.engine.costs import CostModel
from tests.tiny import tiny_pair

LEARNT = EngineConfig(policy=SpecPrefillPolicy(threshold=None))


def planner(token_ms: float, config: EngineConfig = LEARNT) -> Planner:
    pair = tiny_pair()
    costs = CostModel(pair, config)
    for tokens in (32, 256, 512):
        for depth in (0, 1000, 4000):
            costs.observe("target", tokens, depth, token_ms * tokens)
    return Planner(pair, config, costs, lambda _: 512)


@pytest.mark.parametrize(
    ("token_ms", "new", "wanted", "selects"),
    [
        (1, 3000, 600, True),  # saves 2.4 s
        (1, 3000, 2600, False),  # saves .4 s, less than a fifth and less than a second
        (1, 900, 100, False),
        (0.01, 20_000, 4000, False),  # saves .16 s, though it is long
    ],
)
def test_what_was_learnt_decides(token_ms: float, new: int, wanted: int, selects: bool) -> None:
    assert planner(token_ms).selects(new, wanted, 1000) == selects


def test_a_fixed_threshold_is_one_for_additions_too() -> None:
    config = EngineConfig(policy=SpecPrefillPolicy(threshold=100))
    assert planner(1, config).selects(101, 20, 1000)
    assert not planner(1, config).selects(100, 20, 1000)
