"""Accuracy differences with their uncertainty. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["DENSE_FLOOR", "interval", "paired_difference"]

DENSE_FLOOR = 0.8  # below it the full prefill can't do the task, and what sparse prefill loses can't be told
RESAMPLES = 4000


def paired_difference(full: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of other - full over the same items, and its 95 % interval by resampling the items."""
    differences = np.asarray(other, dtype=np.float64) - np.asarray(full, dtype=np.float64)
    return (float(differences.mean()), *interval(differences))


def interval(values: Sequence[float] | npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of the mean by resampling the values."""
    given = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(0).integers(0, given.size, (RESAMPLES, given.size))
    low, high = np.quantile(given[picks].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)
