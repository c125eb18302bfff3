"""Estimates: the dense run in which the dropped tokens' keys and values are replaced by them, on every architecture."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from mlx_specprefill.adapters.estimates import Estimates, Estimator, Known, Layers
from mlx_specprefill.adapters.moved_keys import layer_rotations
from mlx_specprefill.cache.held import HeldTokens
from mlx_specprefill.cache.positioned import Positioned, is_stateful, leaves, make_positioned_cache, place, recalling
from mlx_specprefill.errors import SparseUnsupportedError
from tests.properties.test_sparse_equals_masked import DISCRIMINATION, NAMED, VERIFIED
from tests.support import oracle
from tests.support.oracle import EXACT, Case, Made, build, make_case, masked_dense, relative_error, replaced_dense

CHUNKS = 9, 1, 14, 5  # tokens per forward, in turn
GATHERING = {"deepseek_v32", "glm_moe_dsa"}  # they choose keys by a second cache

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def estimated_of(case: Case) -> np.ndarray:
    """Most of what is dropped; the others stay absent."""
    dropped = np.setdiff1d(np.arange(case.prompt.size, dtype=np.int32), case.kept)
    return dropped[np.arange(dropped.size) % 5 != 3]


def random_estimates(model: nn.Module, length: int) -> Made:
    """Keys and values of the size of real ones, for every token."""
    cache = make_positioned_cache(model)
    mx.eval(model(mx.arange(1, 9)[None], cache=cache), [part.state for part in cache])
    made: Made = {}
    for number, part in enumerate(leaves(cache)):
        if isinstance(part, Positioned) and not part.empty():
            shapes = [(*array.shape[:2], length, array.shape[3]) for array in (part.keys, part.values)]
            scales = [mx.abs(array[..., :8, :]).mean() for array in (part.keys, part.values)]
            keys, values = (scale * mx.random.normal(shape) for shape, scale in zip(shapes, scales, strict=True))
            made[number] = keys, values
    return made


def rows_of(made: Made, rows: np.ndarray) -> Made:
    at = mx.array(rows)
    return {number: (keys[..., at, :], values[..., at, :]) for number, (keys, values) in made.items()}


def prefill(
    model: nn.Module, case: Case, estimated: np.ndarray, made: Made, sizes: Sequence[int] = CHUNKS
) -> tuple[list[Any], mx.array]:
    """The library: each forward's tokens among the estimates in front of them. Return the cache and last logits."""
    cache, start, turn = make_positioned_cache(model), 0, 0
    while start < case.kept.size:
        size = min(sizes[turn % len(sizes)], case.kept.size - start)
        positions = case.kept[start : start + size]
        first = 0 if start == 0 else int(case.kept[start - 1]) + 1
        between = np.arange(first, int(positions[-1]) + 1, dtype=np.int32)
        between = between[np.isin(between, positions) | np.isin(between, estimated)]
        for number, part in enumerate(leaves(cache)):
            if number in made and between.size > positions.size:
                keys, values = rows_of(made, between)[number]
                part.estimate(between, keys, values, np.isin(between, positions), mx.array(positions)[None])
        if between.size == positions.size:
            place(cache, positions)
        logits = model(mx.array(case.prompt[positions])[None], cache=cache)
        mx.eval(logits, [part.state for part in cache])
        start, turn = start + size, turn + 1
    return cache, logits[:, -1]


def decoded(model: nn.Module, case: Case, cache: list[Any], logits: mx.array) -> np.ndarray:
    rows = [logits[0]]
    for token in case.continuation.tolist():
        rows.append(model(mx.array([[token]]), cache=cache)[0, -1])
    return np.stack([np.array(row.astype(mx.float32)) for row in rows])


@pytest.mark.parametrize("name", VERIFIED)
def test_estimates_equal_the_replaced_dense_run(name: str) -> None:
    model = build(name)
    case = make_case(oracle.vocabulary(model))
    estimated, made = estimated_of(case), random_estimates(model, case.prompt.size)
    if name in GATHERING:
        with pytest.raises(SparseUnsupportedError, match="two kinds of keys"):
            Layers(model, model)
        return
    sizes = (9, 14) if name == "plamo3" else CHUNKS  # its window is one narrower for a token alone
    got = decoded(model, case, *prefill(model, case, estimated, made, sizes))
    assert relative_error(got, replaced_dense(model, case, estimated, rows_of(made, estimated))) < 2 * EXACT
    if name in NAMED:
        assert relative_error(got, masked_dense(model, case)) > DISCRIMINATION  # the oracle can fail


class TrueMap(Estimates):
    """The keys and values that full reading gives; a code is a token's index."""

    truth: dict[int, mx.array]

    def of_layer(self, layer: int, codes: mx.array) -> mx.array:
        return self.truth[layer][codes[:, 0].astype(mx.int32)]


@pytest.mark.parametrize("name", VERIFIED)
def test_true_estimates_are_full_reading(name: str) -> None:
    """The keys are turned back, and forth to where they belong; a first layer's keys follow from the tokens."""
    model = build(name)
    if is_stateful(make_positioned_cache(model)):
        pytest.skip("a state skips what is not read, and a ring forgets it")
    try:
        layers = Layers(model, model)
    except SparseUnsupportedError as error:
        pytest.skip(str(error))
    case = make_case(oracle.vocabulary(model))
    dense, M = make_positioned_cache(model), case.prompt.size
    logits = model(mx.array(case.prompt)[None], cache=dense)[:, -1]
    truth = {n: layers.unrotated(n, part, 0, M) for n, part in enumerate(leaves(dense)) if n in layers.made}
    expected = decoded(model, case, dense, logits)
    offsets = {n: mx.zeros((size,)) for n, size in layers.made.items()}
    none = mx.zeros((1,))
    true = TrueMap(none, none, 1.0, mx.zeros((1, 1)), {n: mx.zeros((1, 1)) for n in offsets}, offsets)
    object.__setattr__(true, "truth", truth)
    estimator = Estimator(model, model, true)
    estimator.estimates = true
    codes = KVCache()
    codes.update_and_fetch(mx.arange(M, dtype=mx.float32)[None, None, :, None], mx.ones((1, 1, M, 1)))
    known = Known(case.prompt, [codes], np.ones(case.prompt.size, dtype=np.bool_))
    cache = make_positioned_cache(model)
    for part in np.array_split(case.kept, 4):
        estimator.place(cache, part, known)
        logits = model(mx.array(case.prompt[part])[None], cache=cache)
    assert relative_error(decoded(model, case, cache, logits[:, -1]), expected) < 5 * EXACT


def test_most_models_have_keys_that_can_be_estimated() -> None:
    refused = set()
    for name in VERIFIED:
        try:
            layer_rotations(build(name))
        except SparseUnsupportedError:
            refused.add(name)
    assert len(refused) < len(VERIFIED) / 4


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_moe"])
def test_a_recalled_estimate_gives_its_place_to_what_is_read(name: str) -> None:
    """As if it had never been there, once the tokens that saw it are read."""
    model = build(name)
    case = make_case(oracle.vocabulary(model))
    estimated, made = estimated_of(case), random_estimates(model, case.prompt.size)
    cache, logits = prefill(model, case, estimated, made)
    absent = np.setdiff1d(np.arange(case.prompt.size), np.concatenate([case.kept, estimated]))
    again = np.sort(np.concatenate([estimated[3:9], estimated[-2:], absent[:3]])).astype(np.int32)
    plain = copy.deepcopy(cache)
    for part in leaves(plain):
        stays = ~np.isin(part.held.positions, again)
        at = mx.array(np.flatnonzero(stays))
        held = HeldTokens.of(part.held.marked[stays])
        part.state = (part.keys[..., at, :], part.values[..., at, :], held.size), part.next, held.runs()
    for each in (cache, plain):
        with recalling(each):
            for part in np.array_split(again, 3):
                place(each, part)
                mx.eval(model(mx.array(case.prompt[part])[None], cache=each), [one.state for one in each])
    assert set(again) <= set(next(leaves(cache)).held.read)
    assert next(leaves(cache)).held.size == next(leaves(plain)).held.size
    got, expected = (decoded(model, case, each, logits) for each in (cache, plain))
    assert relative_error(got, expected) < EXACT
