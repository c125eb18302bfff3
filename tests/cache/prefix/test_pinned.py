"""Pinned beginnings: the system prompt and tools that several conversations share, in memory and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_specprefill.cache.budget import ByteBudget
from mlx_specprefill.cache.prefix.disk import DiskTier
from mlx_specprefill.cache.prefix.disk_policy import StoredPrefixCache
from mlx_specprefill.request import SHARED, CacheLabel
from tests.cache.prefix.stores import BLOCK, fake_caches, filled, same

LARGE = 1 << 30
OPENING = tuple(range(1000, 1000 + 5 * BLOCK + 3))  # five blocks and a rest


def conversation(number: int, length: int = 60) -> tuple[int, ...]:
    return (*OPENING, *range(10_000 * number, 10_000 * number + length))


class Cached:
    """A prefix cache on a folder, opened and closed as by a process."""

    def __init__(
        self, folder: Path, make: Any, only_pinned: bool = True, disk: int = LARGE, memory: int = LARGE
    ) -> None:
        self.make = make
        self.tier = DiskTier(folder, disk)
        budget = ByteBudget(memory)
        self.prefixes = StoredPrefixCache(self.tier, only_pinned, "model", make, budget, block_size=BLOCK)

    def __enter__(self) -> Cached:
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.close()

    def ask(
        self,
        tokens: tuple[int, ...],
        system_prefix_len: int = len(OPENING),
        label: CacheLabel = SHARED,
    ) -> int:
        """As a request does: look up, read the rest, store where another may branch off and at the end."""
        hit = self.prefixes.lookup(tokens, len(tokens) - 1, label=label)
        found = 0 if hit is None else hit.length
        if hit is not None:
            assert same(hit.cache, filled(self.make, tokens[:found]))
        for end in (system_prefix_len, len(tokens)):
            if end > found:
                cache = filled(self.make, tokens[:end])
                self.prefixes.store(
                    tokens[:end],
                    cache,
                    label=label,
                    system_prefix_len=system_prefix_len,
                )
        return found

    def on_disk(self) -> int:
        self.tier.flush()
        return len(list(self.tier.folder.rglob("*.safetensors")))


@pytest.fixture(params=["tokens", "stateful"])
def make(request: pytest.FixtureRequest) -> Any:
    return fake_caches() if request.param == "tokens" else fake_caches(stateful=True)


def test_a_system_prompt_is_on_disk_once_a_second_request_begins_with_it_and_nothing_else_is(
    tmp_path: Path, make: Any
) -> None:
    with Cached(tmp_path, make) as one:
        one.ask(conversation(1))
        assert one.on_disk() == 0
        one.ask(conversation(2))
        blocks = one.on_disk()
        stateful = one.prefixes._layout.stateful
        assert blocks == (7 if stateful else 5)  # with the rest and its state, which a stateful model needs
        one.ask(conversation(1, 90))
        one.ask(conversation(1, 120))
        assert one.on_disk() == blocks
    with Cached(tmp_path, make) as later:
        assert later.ask(conversation(3)) == (len(OPENING) if stateful else 5 * BLOCK)


def test_requests_with_a_salt_leave_nothing_on_disk_unless_the_folder_is_for_all(tmp_path: Path, make: Any) -> None:
    salted, owned = CacheLabel("", "secret"), CacheLabel("owner")
    with Cached(tmp_path / "pinned", make) as one:
        for number in range(3):
            one.ask(conversation(number), label=salted)
        assert one.on_disk() == 0
        for number in range(2):
            one.ask(conversation(number), label=owned)
        assert one.on_disk() > 0
    with Cached(tmp_path / "pinned", make) as later:
        assert later.ask(conversation(7), label=SHARED) == 0
        assert later.ask(conversation(8), label=CacheLabel("other")) == 0
        assert later.ask(conversation(9), label=owned) >= 5 * BLOCK


@pytest.mark.parametrize("only_pinned", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_one_off_prompts_never_push_it_out_of_memory_or_off_the_disk(
    tmp_path: Path, make: Any, only_pinned: bool
) -> None:
    with Cached(tmp_path / "one", make, only_pinned) as one:
        one.ask(conversation(1))
        one.ask(conversation(2))
        memory = one.prefixes.nbytes
        one.on_disk()
        disk = one.tier.nbytes
    with Cached(tmp_path / "two", make, only_pinned, disk=3 * disk, memory=3 * memory) as one:
        one.ask(conversation(1))
        one.ask(conversation(2))
        for number in range(3, 120):  # of their own beginnings, each as long, and idle for longer than anything hit
            one.ask(tuple(range(20_000 * number, 20_000 * number + 100)), system_prefix_len=50)
        assert one.prefixes.covers(conversation(500)) >= 5 * BLOCK
        assert one.prefixes._budget.evictions > 0
    with Cached(tmp_path / "two", make, only_pinned, disk=3 * disk) as later:
        assert later.ask(conversation(501)) >= 5 * BLOCK
