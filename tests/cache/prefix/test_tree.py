"""Every hit is what a dense prefill would have computed, whatever came before it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from fractions import Fraction
from functools import cache as memoize
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from mlx_specprefill.cache.budget import GRACE, ByteBudget
from mlx_specprefill.cache.positioned import leaves, make_positioned_cache, place
from mlx_specprefill.cache.prefix.disk import DiskTier
from mlx_specprefill.cache.prefix.disk_policy import StoredPrefixCache
from mlx_specprefill.cache.prefix.nodes import Node, Record, longest_match
from mlx_specprefill.cache.prefix.selection_key import SelectionKey, accepted_by
from mlx_specprefill.cache.prefix.tree import PrefixCache
from mlx_specprefill.request import SHARED
from tests.cache.prefix.stores import BLOCK, contents, decode, fake_caches, feed, filled, held_bytes, same
from tests.support import precision
from tests.support.precision import numbers
from tests.support.rows import next_position
from tests.support.tiny import WINDOW, random_prompt, tiny_model

FAMILIES = ("llama", "qwen3_5", "nemotron_h", "gpt_oss")
STATEFUL = {"llama": False, "qwen3_5": True, "nemotron_h": True, "gpt_oss": True}
LARGE = 1 << 30


@memoize
def model_of(family: str) -> nn.Module:
    return tiny_model(family)


def prefix_cache(family: str, budget: int = LARGE, disk: DiskTier | None = None) -> PrefixCache:
    model = model_of(family)
    kind = PrefixCache if disk is None else partial(StoredPrefixCache, disk, False)
    return kind(family, lambda: make_positioned_cache(model), ByteBudget(budget), block_size=BLOCK)


def dense(family: str, tokens: tuple[int, ...], step: int = BLOCK) -> tuple[list[Any], mx.array]:
    cache = make_positioned_cache(model_of(family))
    return cache, feed(model_of(family), cache, tokens, step)


def sparse(family: str, tokens: tuple[int, ...]) -> list[Any]:
    """A cache that stands for `tokens` but dropped every third of them."""
    kept = np.flatnonzero(np.arange(len(tokens)) % 3 != 1).astype(np.int32)
    cache = make_positioned_cache(model_of(family))
    place(cache, kept)
    model_of(family)(mx.array([tokens[i] for i in kept])[None], cache=cache)
    mx.eval([part.state for part in cache])
    return cache


# --- the property -----------------------------------------------------------------------------------------------------

REQUESTS = st.tuples(
    st.just("request"),
    st.integers(0, 2),  # which conversation
    st.integers(0, 40),  # tokens of it
    st.integers(0, 3),  # seed of what follows
    st.integers(2, 14),  # tokens that follow
    st.sampled_from([5, BLOCK, 13]),  # tokens per slice
)
STEPS = st.one_of(
    REQUESTS, REQUESTS, REQUESTS, REQUESTS, st.tuples(st.sampled_from(["restart", "sparse", "drop", "clear"]))
)


class Server:
    """An engine in miniature, which compares every hit with a dense recompute."""

    def __init__(self, family: str, budget: int, folder: Path | None) -> None:
        self.family, self.limit, self.folder = family, budget, folder
        self.model = model_of(family)
        self.disk: DiskTier | None = None
        self.hits = 0
        self.last: tuple[int, ...] = random_prompt(20)
        self.start()

    def start(self) -> None:
        if self.disk is not None:
            self.disk.close()
        self.disk = DiskTier(self.folder, 1 << 22) if self.folder is not None else None
        self.prefixes = prefix_cache(self.family, self.limit, self.disk)

    def step(self, name: str, *arguments: int) -> None:
        if name == "request":
            conversation, shared, seed, count, size = arguments
            self.last = random_prompt(40, conversation)[:shared] + random_prompt(count, 100 + seed)
            self.request(self.last, size)
        elif name == "restart":
            self.start()
        elif name == "sparse":
            cache = sparse(self.family, self.last)
            with pytest.raises(ValueError, match="sparse"):
                self.prefixes.store(self.last, cache)
            self.prefixes.store(self.last, cache, selection_key=SelectionKey(Fraction(1, 5), "default", "user"))
        elif name == "drop":
            entries = self.prefixes.entries()
            assert not entries or self.prefixes.drop(entries[len(entries) // 2].id)
        else:
            self.prefixes.clear()
            assert self.prefixes.nbytes == 0
            assert not self.prefixes.entries()
        self.check_bytes()

    def check_bytes(self) -> None:
        budget = self.prefixes._budget
        assert held_bytes(self.prefixes) == self.prefixes.nbytes == budget.used <= budget.limit
        for node in self.prefixes._nodes():
            needing = [node.state, *(child.record for child in node.children.values())]
            assert node.held_dependants == sum(record is not None and record.held for record in needing)

    def request(self, prompt: tuple[int, ...], size: int) -> None:
        hit = self.prefixes.lookup(prompt, len(prompt) - 1)
        cache = make_positioned_cache(self.model) if hit is None else hit.cache
        held = 0 if hit is None else hit.length
        assert held < len(prompt)
        if hit is not None:
            self.hits += 1
            reference, _ = dense(self.family, prompt[:held])
            assert_close(hit.cache, reference)
        for start in range(held, len(prompt), size):
            end = min(start + size, len(prompt))
            logits = feed(self.model, cache, prompt[start:end], size)
            self.prefixes.store(prompt[:end], cache)
            self.check_bytes()
        answer = self.compare(prompt, cache, logits)
        self.prefixes.store(prompt + tuple(answer[:-1]), cache)

    def compare(self, prompt: tuple[int, ...], cache: list[Any], logits: mx.array) -> list[int]:
        ours, our_rows = decode(self.model, cache, logits, 8)
        reference, last = dense(self.family, prompt)
        theirs, their_rows = decode(self.model, reference, last, 8)
        for a, b, row, other in zip(ours, theirs, our_rows, their_rows, strict=True):
            precision.assert_close(row, other, rtol=2e-4, atol=2e-4)
            top = np.sort(numbers(other)[0])
            if a != b:
                assert top[-1] - top[-2] < precision.bound(4e-4, top[-1]), "tokens differ although it is no tie"
                break
        return ours


def assert_close(ours: list[Any], theirs: list[Any]) -> None:
    assert next_position(ours) == next_position(theirs)
    for a, b in zip(contents(ours, in_order=True), contents(theirs, in_order=True), strict=True):
        for x, y in zip(a, b, strict=True):
            if x is None or isinstance(x, int):
                assert x == y
            else:
                # After larger chunks a ring holds more of the past than its window.
                count = min(x.shape[-2], y.shape[-2])
                precision.assert_close(x[..., -count:, :], y[..., -count:, :], rtol=2e-4, atol=2e-4)


@pytest.mark.extended
@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=12,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking would run the models for minutes
)
@given(st.lists(STEPS, min_size=3, max_size=9), st.sampled_from([LARGE, 120_000, 30_000]), st.booleans())
def test_every_hit_equals_a_dense_recompute(family: str, steps: list[Any], budget: int, on_disk: bool) -> None:
    with TemporaryDirectory() as folder:
        server = Server(family, budget, Path(folder) if on_disk else None)
        try:
            for step in steps:
                server.step(*step)
        finally:
            if server.disk is not None:
                server.disk.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.extended
def test_the_property_meets_hits_evictions_and_restarts(family: str, tmp_path: Path) -> None:
    """A fixed run of the same machine, so that the property is known to see what it is about."""
    server = Server(family, 15_000 * precision.dtype().size, tmp_path)
    for turn in range(12):
        server.step("request", turn % 2, 12 + 2 * turn, turn % 3, 6, (5, BLOCK, 13)[turn % 3])
        if turn in (4, 9):
            server.step("restart")
        server.step("sparse")
    assert server.hits >= 6
    assert server.prefixes._budget.evictions > 0


# --- one stored run, read in every way --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_is_bit_equal_to_the_run_that_was_stored(family: str) -> None:
    model, prompt = model_of(family), random_prompt(45, 7)
    prefixes = prefix_cache(family)
    cache, snapshots, logits = make_positioned_cache(model), dict[Any, Any](), dict[Any, Any]()
    for end in (8, 16, 21, 32, 45):
        start = max(snapshots, default=0)
        logits[end] = feed(model, cache, prompt[start:end], end - start)
        snapshots[end] = copy.deepcopy(cache)
        prefixes.store(prompt[:end], cache)
    for limit in range(1, 46):
        hit = prefixes.lookup(prompt, limit)
        expected = max((end for end in snapshots if end <= limit), default=None) if STATEFUL[family] else limit
        assert (None if hit is None else hit.length) == expected
        if hit is None:
            continue
        if hit.length in snapshots:
            assert _valid(hit.cache) == _valid(snapshots[hit.length])
            following = min((end for end in snapshots if end > hit.length), default=None)
            if following is not None:
                rest = feed(model, hit.cache, prompt[hit.length : following], following - hit.length)
                assert mx.array_equal(rest, logits[following]).item()
        else:
            whole = next(part for part in leaves(snapshots[45]))
            part = next(iter(leaves(hit.cache)))
            assert mx.array_equal(part.keys[..., :limit, :], whole.keys[..., :limit, :]).item()
    assert prefixes.lookup(random_prompt(20, 99), 19) is None


def _valid(cache: list[Any]) -> list[bytes]:
    """Bytes of what counts: all of plain and recurrent layers, of a ring what its next write keeps."""
    found = []
    for part in leaves(cache):
        size = getattr(part, "max_size", None)
        part = getattr(part, "inner", part)
        if isinstance(part, ArraysCache):
            found += [numbers(array).tobytes() for array in part.cache if array is not None]
        else:
            found += [numbers(array)[:, :, -size if size else 0 :].tobytes() for array in part.keys_and_values()]
    return found


@pytest.mark.parametrize("following", [5, 300])
def test_a_hit_is_copied_once_and_by_the_forward(following: int) -> None:
    """The look-up computes nothing; the forward writes into the room that the copy was made with."""
    model, prompt = model_of("llama"), random_prompt(600 + following, 11)
    prefixes = PrefixCache("m", lambda: make_positioned_cache(model), ByteBudget(LARGE), block_size=256)
    prefixes.store(prompt[:600], dense("llama", prompt[:600], 600)[0])
    whole, logits = dense("llama", prompt[:600], 600)[0], None
    logits = feed(model, whole, prompt[600:], following)
    before = mx.get_active_memory()
    hit = prefixes.lookup(prompt, 600)
    assert mx.get_active_memory() - before < 16_000  # and not the bytes of 600 tokens
    slots = [part.keys.shape[2] for part in hit.cache]
    assert mx.array_equal(feed(model, hit.cache, prompt[600:], following), logits).item()
    assert same(hit.cache, whole)
    assert [part.keys.shape[2] for part in hit.cache] == slots
    assert max(slots) < 600 + following + 256


def test_what_was_found_outlives_its_eviction() -> None:
    """Nothing has been copied when the blocks go."""
    make = fake_caches()
    prefixes = PrefixCache("m", make, (budget := ByteBudget(LARGE)), block_size=BLOCK)
    tokens = tuple(range(40))
    prefixes.store(tokens, filled(make, tokens))
    hit = prefixes.lookup((*tokens[:30], 99), 30)
    budget.shrink(LARGE)
    assert budget.used == prefixes.nbytes == 0
    assert same(hit.cache, filled(make, tokens[:30]))


def test_prompts_share_the_blocks_they_have_in_common() -> None:
    make = fake_caches()
    prefixes = PrefixCache("m", make, ByteBudget(LARGE), block_size=BLOCK)
    one, two = tuple(range(40)), (*range(20), *range(50, 70))
    prefixes.store(one, filled(make, one))
    alone = prefixes.nbytes
    prefixes.store(two, filled(make, two))
    assert alone == 40 * _PER_TOKEN
    assert prefixes.nbytes == (40 + 40 - 16) * _PER_TOKEN  # two blocks in common; tokens 16..19 are in both thirds
    hit = prefixes.lookup((*range(20), 99, 98), 21)
    assert hit.length == 20
    assert same(hit.cache, filled(make, tuple(range(20))))
    assert prefixes.lookup(two, 39).length == 39


_PER_TOKEN = 2 * 2 * (4 + 2) * 4  # two layers, two heads, four and two float32


def test_known_blocks_are_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    make = fake_caches()
    prefixes = PrefixCache("m", make, ByteBudget(LARGE), block_size=BLOCK)
    tokens = tuple(range(64))
    prefixes.store(tokens, filled(make, tokens))
    copied: list[tuple[int, int]] = []
    real = prefixes._layout.delta

    def delta(cache: list[Any], start: int, end: int) -> dict[str, mx.array]:
        copied.append((start, end))
        return real(cache, start, end)

    monkeypatch.setattr(prefixes._layout, "delta", delta)
    longer = (*tokens, *range(100, 120))
    prefixes.store(longer, filled(make, longer))
    prefixes.store(longer, filled(make, longer))
    assert copied == [(64, 72), (72, 80), (80, 84)]


def test_a_stored_block_does_not_keep_the_whole_cache_alive() -> None:
    """A view of eight tokens would hold the buffer of all of them."""
    make = fake_caches()
    prefixes = PrefixCache("m", make, ByteBudget(20_000_000), block_size=256)
    tokens = tuple(range(40_000))
    cache = filled(make, tokens)
    before = mx.get_active_memory()
    prefixes.store(tokens[:256], _first(cache, 256))
    del cache
    assert before - mx.get_active_memory() > 0.9 * 40_000 * _PER_TOKEN


def _first(cache: list[Any], count: int) -> list[Any]:
    for part in cache:
        part.trim(part.offset - count)
    return cache


def test_a_tail_gives_way_to_the_block_that_covers_it() -> None:
    make = fake_caches()
    prefixes = PrefixCache("m", make, ByteBudget(LARGE), block_size=BLOCK)
    for length in (3, 5, 12, 13, 24):
        prefixes.store(range(length), filled(make, range(length)))
        prefixes.store(range(length), filled(make, range(length)))
    assert prefixes.nbytes == 24 * _PER_TOKEN
    prefixes.store(range(10), filled(make, range(10)))
    assert prefixes.nbytes == 24 * _PER_TOKEN
    assert [entry.tokens for entry in prefixes.entries()] == [24]


# --- what must not get in ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sparse_cache_is_refused(family: str) -> None:
    prefixes, prompt = prefix_cache(family), random_prompt(30)
    with pytest.raises(ValueError, match="sparse"):
        prefixes.store(prompt, sparse(family, prompt))
    kept_only = tuple(prompt[i] for i in range(30) if i % 3 != 1)
    with pytest.raises(ValueError, match="sparse"):
        prefixes.store(kept_only, sparse(family, prompt))
    assert prefixes.nbytes == 0
    assert prefixes.lookup(prompt) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sparse_cache_whose_last_gap_left_the_window_is_refused(family: str) -> None:
    """Only the shift tells: the ring holds consecutive positions again."""
    model, prompt = model_of(family), random_prompt(80)
    kept = np.array([0, 1, *range(10, 80)], dtype=np.int32)
    cache = make_positioned_cache(model)
    for start, end in ((0, 2), (2, 72)):
        place(cache, kept[start:end])
        model(mx.array([prompt[i] for i in kept[start:end]])[None], cache=cache)
    with pytest.raises(ValueError, match="sparse"):
        prefix_cache(family).store(prompt, cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_counts_are_refused(family: str) -> None:
    prefixes, prompt = prefix_cache(family), random_prompt(30)
    cache, _ = dense(family, prompt)
    for tokens in (prompt[:-1], (*prompt, 4), prompt[:8]):
        with pytest.raises(ValueError, match="holds"):
            prefixes.store(tokens, cache)
    with pytest.raises(ValueError, match="empty"):
        prefixes.store(prompt, make_positioned_cache(model_of(family)))
    with pytest.raises(ValueError, match="not of this model"):
        prefixes.store(prompt, [KVCache()])
    assert prefixes.nbytes == 0


def test_several_rows_are_refused() -> None:
    cache = [KVCache(), KVCache()]
    for part in cache:
        part.update_and_fetch(mx.zeros((2, 1, 4, 4)), mx.zeros((2, 1, 4, 4)))
    with pytest.raises(ValueError, match="rows"):
        PrefixCache("m", fake_caches(), ByteBudget(LARGE)).store(range(4), cache)


def test_caches_that_cannot_be_stored_turn_it_off() -> None:
    prefixes = PrefixCache("m", lambda: [QuantizedKVCache()], ByteBudget(LARGE))
    assert prefixes.refusal is not None
    assert "QuantizedKVCache" in prefixes.refusal
    prefixes.store(range(4), [QuantizedKVCache()])
    assert prefixes.lookup(range(4)) is None
    assert prefixes.misses == 1


def test_layers_that_are_never_written_do_not_matter() -> None:
    make: Callable[[], Any] = lambda: [KVCache(), KVCache()]  # noqa: E731
    cache = make()
    cache[0].update_and_fetch(mx.ones((1, 1, 4, 4)), mx.ones((1, 1, 4, 4)))
    prefixes = PrefixCache("m", make, ByteBudget(LARGE), block_size=BLOCK)
    prefixes.store(range(4), cache)
    hit = prefixes.lookup(range(4))
    assert hit.cache[0].offset == 4
    assert hit.cache[1].empty()


# --- the budget -------------------------------------------------------------------------------------------------------


def serve(prefixes: PrefixCache, make: Callable[[], Any], prompt: tuple[int, ...], ends: tuple[int, ...] = ()) -> int:
    """One request as the engine makes it; the tokens that were found."""
    hit = prefixes.lookup(prompt, len(prompt) - 1)
    for end in (*ends, len(prompt)):
        if hit is None or end > hit.length:
            prefixes.store(prompt[:end], filled(make, prompt[:end]))
            assert prefixes._budget.used <= prefixes._budget.limit
    return 0 if hit is None else hit.length


def short(seed: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(3000, 9000, 60 + 10 * (seed % 9)))


@pytest.mark.parametrize("stateful", [False, True])
def test_an_agents_prefix_survives_a_dozen_short_requests(stateful: bool) -> None:
    make, agent = fake_caches(stateful), tuple(range(2048))
    need = 2100 * _PER_TOKEN + 4096
    prefixes = PrefixCache("m", make, ByteBudget(need * 8 // 7), block_size=64)
    assert serve(prefixes, make, (*agent, 5000, 5001, 5002), (2048,)) == 0
    assert serve(prefixes, make, (*agent, 5000, 6001, 6002, 6003), (2048,)) >= 2048
    for seed in range(12):
        assert serve(prefixes, make, short(seed)) == 0
    assert prefixes._budget.evictions > 0, "the budget was not tight"
    assert serve(prefixes, make, (*agent, 7000, 7001), (2048,)) == 2048


@pytest.mark.parametrize("stateful", [False, True])
def test_old_prefixes_do_not_keep_new_ones_out(stateful: bool) -> None:
    """A full budget of shared prefixes still takes a newcomer, and lets it grow once it was hit."""
    make = fake_caches(stateful)
    prefixes = PrefixCache("m", make, ByteBudget(4096 * _PER_TOKEN), block_size=64)
    for base in range(0, 40_000, 1000):
        for turn in range(3):
            serve(prefixes, make, (*range(base, base + 900), *range(50_000 + turn, 50_010 + turn)), (900,))
    prompt = tuple(range(90_000, 90_400))
    assert serve(prefixes, make, prompt) == 0
    assert serve(prefixes, make, (*prompt, 1)) == 400


def test_a_shared_prefix_that_nobody_asks_for_goes_in_the_end() -> None:
    make, agent = fake_caches(), tuple(range(1024))
    prefixes = PrefixCache("m", make, ByteBudget(1400 * _PER_TOKEN), block_size=64)
    serve(prefixes, make, agent)
    serve(prefixes, make, agent)
    for seed in range(int(GRACE) - 1):
        serve(prefixes, make, short(seed))
    assert prefixes.lookup(agent, again=True) is not None
    for seed in range(200, 200 + 2 * int(GRACE)):
        serve(prefixes, make, short(seed))
    assert serve(prefixes, make, agent) < 1024


def test_leaves_go_before_what_they_continue() -> None:
    make = fake_caches()
    prefixes = PrefixCache("m", make, ByteBudget(20 * BLOCK * _PER_TOKEN), block_size=BLOCK)
    serve(prefixes, make, tuple(range(16 * BLOCK)))
    found = []
    for base in range(8):
        tokens = tuple(range(1000 * (base + 1), 1000 * (base + 1) + 2 * BLOCK))
        serve(prefixes, make, tokens)
        hit = longest_match(prefixes._roots[SHARED], np.arange(16 * BLOCK, dtype=np.int32), accepted_by(None))
        found.append(0 if hit is None else hit.length // BLOCK)
    assert found == [16, 16, 14, 12, 10, 8, 6, 4]  # shrinks from its end, and stays usable


@pytest.mark.parametrize("on_disk", [False, True])
def test_an_eviction_looks_at_one_block(on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at those that it continues, nor at others that continue the same one and are on disk only."""
    make, budget, disk = fake_caches(), ByteBudget(LARGE), DiskTier(tmp_path, LARGE) if on_disk else None
    kind = PrefixCache if disk is None else partial(StoredPrefixCache, disk, False)
    prefixes = kind("m", make, budget, block_size=BLOCK)
    shared = tuple(range(50 * BLOCK))
    for number in range(100):
        tokens = (*shared, *range(10_000 + 10 * number, 10_005 + 10 * number))
        prefixes.store(tokens, filled(make, tokens))
    assert prefixes.lookup(shared) is not None  # used before the others, but in a class of its own
    seen: list[str] = []
    path, held = Node.path, vars(Record)["held"]
    monkeypatch.setattr(Node, "path", lambda node: seen.append("path") or path(node))
    monkeypatch.setattr(Record, "held", property(lambda one: seen.append("held") or held.fget(one), held.fset))
    budget.shrink(LARGE)
    assert budget.evictions == 150
    assert seen.count("path") == 0
    assert seen.count("held") <= 10 * 150
    if disk is not None:
        disk.close()


def test_without_room_the_longest_prefix_that_fits_is_kept() -> None:
    make = fake_caches()
    prefixes = PrefixCache("m", make, ByteBudget(5 * BLOCK * _PER_TOKEN + 10), block_size=BLOCK)
    assert serve(prefixes, make, tuple(range(200))) == 0
    assert prefixes.nbytes == 5 * BLOCK * _PER_TOKEN
    assert serve(prefixes, make, tuple(range(200))) == 5 * BLOCK


def test_without_room_for_the_state_nothing_is_kept() -> None:
    make = fake_caches(stateful=True)
    prefixes = PrefixCache("m", make, ByteBudget(4 * BLOCK * _PER_TOKEN), block_size=BLOCK)
    serve(prefixes, make, tuple(range(4 * BLOCK)))
    assert prefixes.nbytes == 0
    serve(prefixes, make, tuple(range(3 * BLOCK)))
    assert prefixes.nbytes == 3 * BLOCK * _PER_TOKEN + 48


def test_several_caches_share_one_budget() -> None:
    make, budget = fake_caches(), ByteBudget(60 * BLOCK * _PER_TOKEN)
    target = PrefixCache("target", make, budget, block_size=BLOCK)
    draft = PrefixCache("draft", make, budget, block_size=BLOCK)
    serve(target, make, tuple(range(20 * BLOCK)))
    serve(draft, make, tuple(range(10 * BLOCK)))
    assert budget.used == target.nbytes + draft.nbytes
    serve(draft, make, tuple(range(500, 500 + 50 * BLOCK)))
    assert budget.used == target.nbytes + draft.nbytes <= budget.limit
    assert target.nbytes == 0  # the oldest of both
    budget.shrink(budget.limit)
    assert budget.used == 0


# --- for people -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stateful", [False, True])
def test_counts_entries_and_drop(stateful: bool) -> None:
    make = fake_caches(stateful)
    prefixes = PrefixCache("m", make, ByteBudget(LARGE), block_size=BLOCK)
    state = 48 if stateful else 0
    one, two = tuple(range(40)), (*range(16), *range(50, 60))
    serve(prefixes, make, one)
    serve(prefixes, make, two, () if not stateful else (16,))
    hit = prefixes.lookup((*two, 1))
    assert hit.length == 26
    first_hit = 0 if stateful else 16
    assert (prefixes.hits, prefixes.misses, prefixes.tokens_served) == (2 - stateful, 1 + stateful, 26 + first_hit)
    assert prefixes.nbytes == 50 * _PER_TOKEN + (3 * state)
    entries = prefixes.entries()
    assert len(entries) == 2 + stateful
    newest = entries[0]
    assert (newest.kind, newest.tokens, newest.hits, newest.on_disk) == ("target", 26, 1, False)
    assert newest.last_use > 1e9
    assert newest.nbytes == 10 * _PER_TOKEN + state
    assert prefixes.drop(newest.id)
    assert not prefixes.drop(newest.id)
    assert prefixes.nbytes == 40 * _PER_TOKEN + 2 * state == prefixes._budget.used
    assert prefixes.lookup((*two, 1)).length == 16
    prefixes.clear()
    assert prefixes.nbytes == prefixes._budget.used == 0
    assert prefixes.entries() == []


# --- when arrays are evaluated ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_all_that_is_stored_is_evaluated_at_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each evaluation waits for the device: a prompt of 64K tokens has 256 blocks."""
    tokens, evaluated = random_prompt(5 * BLOCK + 3), list[Any]()
    cache, _ = dense(family, tokens)
    prefixes, evaluate = prefix_cache(family), mx.eval
    monkeypatch.setattr(mx, "eval", lambda *trees: evaluated.append(trees) or evaluate(*trees))
    prefixes.store(tokens, cache)
    assert len(evaluated) == 1
    prefixes.store(tokens, cache)  # known already
    assert not any(evaluated[1:][0][0])


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_what_can_not_be_evaluated_is_not_there(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known, tokens = random_prompt(2 * BLOCK), random_prompt(5 * BLOCK + 3)
    tokens = known + tokens[len(known) :]
    prefixes = prefix_cache(family)
    prefixes.store(known, dense(family, known)[0])
    held, cache = prefixes.nbytes, dense(family, tokens)[0]

    def full(*_: object) -> None:
        raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", full)
        with pytest.raises(RuntimeError, match="Insufficient"):
            prefixes.store(tokens, cache)
    assert prefixes.nbytes == held == held_bytes(prefixes) == prefixes._budget.used
    assert prefixes.covers(tokens) == len(known)
    prefixes.store(tokens, cache)
    assert prefixes.covers(tokens) == len(tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_store_may_wait_while_the_cache_goes_on(family: str) -> None:
    tokens = random_prompt(WINDOW + 4 * BLOCK + 3)
    cache, _ = dense(family, tokens)
    prefixes = prefix_cache(family)
    state = prefixes.state(cache)
    feed(model_of(family), cache, (7, 8, 9))
    with pytest.raises(ValueError, match="tokens, not"):
        prefixes.store(tokens, cache)
    prefixes.store(tokens, cache, state=state)
    at_once = prefix_cache(family)
    at_once.store(tokens, dense(family, tokens)[0])
    late, early = prefixes.lookup((*tokens, 7)), at_once.lookup((*tokens, 7))
    assert late.length == early.length == len(tokens)
    assert same(late.cache, early.cache)
