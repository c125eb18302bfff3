"""Records under one label do not exist under another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlx_specprefill import CacheLabel
from mlx_specprefill.cache.budget import ByteBudget
from mlx_specprefill.cache.prefix.disk import DiskTier
from mlx_specprefill.cache.prefix.disk_policy import StoredPrefixCache
from mlx_specprefill.cache.prefix.tree import PrefixCache
from mlx_specprefill.request import SHARED
from tests.cache.prefix.stores import BLOCK, fake_caches, filled

LABELS = [SHARED, CacheLabel("ann"), CacheLabel("bob"), CacheLabel("ann", "x"), CacheLabel("", "x")]
PROMPT = tuple(range(20))
STATEFUL = pytest.mark.parametrize("make", [fake_caches(), fake_caches(stateful=True)], ids=["keys", "states"])
Make = Callable[[], list[Any]]


def prefix_cache(make: Make, disk: DiskTier | None = None, budget: int = 1 << 30) -> PrefixCache:
    kind = PrefixCache if disk is None else partial(StoredPrefixCache, disk, False)
    return kind("model", make, ByteBudget(budget), block_size=BLOCK)


def found(prefixes: PrefixCache, label: CacheLabel, tokens: tuple[int, ...] = PROMPT) -> int:
    hit = prefixes.lookup(tokens, label=label)
    return 0 if hit is None else hit.length


@STATEFUL
@pytest.mark.parametrize("label", LABELS, ids=str)
def test_a_prefix_is_found_under_its_own_label_only(make: Make, label: CacheLabel) -> None:
    prefixes = prefix_cache(make)
    prefixes.store(PROMPT, filled(make, PROMPT), label=label)
    assert {other: found(prefixes, other) for other in LABELS} == {
        other: len(PROMPT) if other == label else 0 for other in LABELS
    }


@STATEFUL
def test_each_label_has_its_own_arrays(make: Make) -> None:
    """The same prompt is stored once for each, and dropping one leaves the others."""
    prefixes = prefix_cache(make)
    sizes = []
    for label in LABELS:
        prefixes.store(PROMPT, filled(make, PROMPT), label=label)
        sizes.append(prefixes.nbytes)
    assert sizes == [sizes[0] * (i + 1) for i in range(len(LABELS))]
    assert len({entry.id for entry in prefixes.entries()}) == len(LABELS)
    prefixes.clear("ann")
    assert [found(prefixes, label) for label in LABELS] == [20, 0, 20, 0, 20]
    (of_bob,) = [entry for entry in prefixes.entries() if entry.label.owner == "bob"]
    assert not prefixes.drop(of_bob.id, "ann")
    assert found(prefixes, CacheLabel("bob")) == 20
    assert prefixes.drop(of_bob.id, "bob")
    assert [found(prefixes, label) for label in LABELS] == [20, 0, 0, 0, 20]
    prefixes.clear()
    assert (prefixes.entries(), prefixes.nbytes) == ([], 0)


@STATEFUL
def test_labels_survive_a_restart(make: Make, tmp_path: Path) -> None:
    for stored in LABELS:
        disk = DiskTier(tmp_path, 1 << 30)
        prefix_cache(make, disk).store(PROMPT, filled(make, PROMPT), label=stored)
        disk.close()
    disk = DiskTier(tmp_path, 1 << 30)
    prefixes = prefix_cache(make, disk)
    assert {entry.label for entry in prefixes.entries()} == set(LABELS)
    assert [found(prefixes, label) for label in LABELS] == [20] * len(LABELS)
    assert found(prefixes, CacheLabel("eve")) == 0
    prefixes.clear("ann")
    disk.close()
    disk = DiskTier(tmp_path, 1 << 30)
    prefixes = prefix_cache(make, disk)
    assert [found(prefixes, label) for label in LABELS] == [20, 0, 20, 0, 20]
    disk.close()


def test_labels_without_anything_are_forgotten() -> None:
    """A client may send a new one with every request."""
    make = fake_caches()
    prefixes = prefix_cache(make)
    prefixes.store(PROMPT, filled(make, PROMPT))
    prefixes = prefix_cache(make, budget=3 * prefixes.nbytes)
    for i in range(40):
        label = CacheLabel("ann", f"salt{i}")
        assert found(prefixes, label) == 0
        prefixes.store(PROMPT, filled(make, PROMPT), label=label)
    assert len(prefixes._roots) <= 8  # blocks that there is room for


@pytest.mark.parametrize("part", ["a/b", "a@b", "é", "x" * 65, "\n"])
def test_a_label_can_be_written_into_names(part: str) -> None:
    for where in ("owner", "salt"):
        with pytest.raises(ValueError, match=f"{where} must be"):
            CacheLabel(**{where: part})
