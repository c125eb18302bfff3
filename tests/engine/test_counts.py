"""The host's waits for the device. Each wait is a pause of the device."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from benchmarks.harness.counts import counted, per_part

from mlx_specprefill import ModelPair

from ..tiny import tiny_pair
from .test_staged import own_pair


def test_every_kind_of_wait_is_counted() -> None:
    with counted() as counts:
        x = mx.array([1, 2]) + 1
        mx.async_eval(x)
        mx.eval(x)
        np.array(x)
        np.asarray(x)
        x.tolist()
        x[0].item()
        np.array([1])
    assert counts == {"queued": 1, "waits": 5}
    x.tolist()
    assert counts["waits"] == 5


@pytest.mark.parametrize(
    "pair", [tiny_pair("llama"), tiny_pair("qwen3_5"), own_pair()], ids=["llama", "qwen3_5", "own layers"]
)
def test_the_host_waits_once_per_token_and_twice_per_prefill_chunk(pair: ModelPair) -> None:
    for part, counts in per_part(pair).items():
        assert counts["waits"] <= (1 if "decode" in part else 2), (part, counts)
