"""The arithmetic of tiny models, float32 or what `--dtype` says, and everything in the tests that depends on it.

"rounded" computes in float32 and rounds the result of every operation to bfloat16, as a GPU does, also where the CPU
backend lacks half precision.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.rounding import rounded

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "rounded": mx.float32}  # of the weights
HALF = 0.05  # of the largest value: what rounding in half precision may change

_chosen = "float32"


def choose(name: str) -> None:
    global _chosen
    _chosen = name


def dtype() -> mx.Dtype:
    return DTYPES[_chosen]


def name() -> str:
    """Return the name of the weights' dtype."""
    return "float32" if is_rounded() else _chosen


def is_rounded() -> bool:
    return _chosen == "rounded"


def in_float32() -> bool:
    """Return whether results are float32, too."""
    return _chosen == "float32"


def float32_only(reason: str) -> pytest.MarkDecorator:
    """Skips a test in half precision."""
    return pytest.mark.skipif(not in_float32(), reason=reason)


def near_ties() -> pytest.MarkDecorator:
    """Skips, in half precision, a test of answers that are equal in float32 only."""
    return float32_only("it meets two tokens that are almost equally likely, and rounding decides")


def gathers(model: nn.Module) -> bool:
    """Return whether a model has experts, which GatherMM multiplies with. MLX has that on the CPU in float32 only."""
    experts = sys.modules.get("mlx_lm.models.switch_layers")  # not imported here: tests without models start at once
    return experts is not None and any(isinstance(part, experts.SwitchLinear) for part in model.modules())


def cast(model: nn.Module, to: mx.Dtype | None = None) -> nn.Module:
    """Return a model in a dtype. Skips the test where this backend can't run the model in it."""
    model.set_dtype(to or dtype())
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    if (to or dtype()) != mx.float32 and on_cpu and gathers(model):
        pytest.skip("GatherMM takes float32 only on the CPU backend")
    return rounded(model, mx.bfloat16) if to is None and is_rounded() else model


def numbers(array: mx.array) -> npt.NDArray[Any]:
    """On the host. NumPy has no bfloat16."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def bound(exact: float, largest: float) -> float:
    """Return the largest allowed difference: `exact` in float32, a share of the largest value in half precision."""
    return exact if in_float32() else HALF * largest


def assert_close(ours: Any, theirs: Any, atol: float, rtol: float = 1e-7) -> None:
    """In float32 within these tolerances, in half precision within `bound`; `atol` 0: equal in both."""
    ours, theirs = (numbers(one) if isinstance(one, mx.array) else np.asarray(one) for one in (ours, theirs))
    if not in_float32():
        rtol, atol = 0.0, bound(atol, float(np.abs(theirs).max(initial=0.0))) if atol else 0.0
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)
