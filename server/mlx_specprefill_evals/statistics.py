"""Accuracy differences with their uncertainty. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

DENSE_FLOOR = 0.8  # below it the full prefill can't do the task, and what sparse prefill loses can't be told
RESAMPLES = 4000


def paired_difference(
    full: Sequence[float], other: Sequence[float], groups: Sequence[object] | None = None
) -> tuple[float, float, float]:
    """Return the mean of other - full over the same items, and its `interval`."""
    differences = np.asarray(other, dtype=np.float64) - np.asarray(full, dtype=np.float64)
    return (float(differences.mean()), *interval(differences, groups))


def interval(
    values: Sequence[float] | npt.NDArray[np.float64], groups: Sequence[object] | None = None
) -> tuple[float, float]:
    """Return the 95 % interval of the mean by resampling the values.

    Args:
        groups: the group of each value: whole groups are resampled, because their values are not independent.
    """
    given = np.asarray(values, dtype=np.float64)
    members: dict[object, list[int]] = {}
    for index, group in enumerate(range(given.size) if groups is None else groups):
        members.setdefault(group, []).append(index)
    sums = np.array([given[own].sum() for own in members.values()])
    sizes = np.array([len(own) for own in members.values()])
    picks = np.random.default_rng(0).integers(0, sums.size, (RESAMPLES, sums.size))
    low, high = np.quantile(sums[picks].sum(axis=1) / sizes[picks].sum(axis=1), (0.025, 0.975))
    return float(low), float(high)
