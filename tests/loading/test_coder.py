"""Qwen2.5-Coder: the target's sparse prefill on real weights, and the size and values of packed weights."""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import ModelPair, load_pair
from mlx_specprefill.adapters.patches import install_patches
from mlx_specprefill.cache.positioned import make_positioned_cache
from mlx_specprefill.loading.gguf import describe_gguf, load_gguf
from tests.support.oracle import Case, feed, masked_dense
from tests.support.real_model import coder_files

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
LENGTH, DECODED, CHUNK, KEPT = 512, 3, 32, 0.2
EQUAL = 5e-4  # of any token's log-probability; 1.6e-4 was measured where wrong positions move it by 15


def log_probabilities(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def target() -> Iterator[ModelPair]:
    yield load_pair(coder_files()[0])
    mx.clear_cache()


def case(tokens: list[int], number: int) -> Case:
    """A prompt of source code, of which random chunks are kept."""
    text = np.array(tokens[number * 100 :][: LENGTH + DECODED], dtype=np.int32)
    rng = np.random.default_rng(number)
    chunks = rng.choice(LENGTH // CHUNK, round(KEPT * LENGTH / CHUNK), replace=False)
    kept = np.union1d(np.flatnonzero(np.isin(np.arange(LENGTH) // CHUNK, chunks)), [LENGTH - 1]).astype(np.int32)
    return Case(text[:LENGTH], kept, text[LENGTH:])


@pytest.mark.parametrize("number", range(5))
def test_a_sparse_prefill_equals_the_masked_oracle(target: ModelPair, number: int) -> None:
    install_patches()
    one = case(target.tokenizer.encode(inspect.getsource(heapq)), number)
    truth = log_probabilities(masked_dense(target.target, one))
    kept, positions = one.prompt[one.kept], one.kept
    ours = feed(target.target, make_positioned_cache(target.target), kept, one.continuation, positions, chunks=(64,))
    other = feed(target.target, make_prompt_cache(target.target), kept, one.continuation, chunks=(64,))
    error, moved = (np.abs(log_probabilities(logits) - truth).max() for logits in (ours, other))
    print(f"prompt {number}: off by {error:.1e} in log-probability, at contiguous positions by {moved:.1f}")
    assert error < EQUAL
    assert moved > 0.1


def test_packed_weights_take_little_more_than_the_file() -> None:
    for file in coder_files():
        _, counts = describe_gguf(file)
        assert counts["U8"] + 2 * counts.get("F16", 0) < 1.3 * file.stat().st_size


def test_packed_weights_answer_as_unpacked_ones() -> None:
    file = coder_files()[1]
    (first, tokenizer, _), (second, *_) = (load_gguf(file, dtype=mx.float32, pack=pack) for pack in (True, False))
    size = sum(array.nbytes for _, array in tree_flatten(first.parameters()))
    assert size < 1.5 * file.stat().st_size  # scales are float32 here
    tokens = mx.array(tokenizer.encode(inspect.getsource(heapq))[:48])[None]
    packed, unpacked = (log_probabilities(np.array(model(tokens)[0])) for model in (first, second))
    divergence = (np.exp(unpacked) * (unpacked - packed)).sum(axis=-1)
    print(f"KL of packed weights {divergence.mean():.1e}, largest {divergence.max():.1e}")
    assert divergence.mean() < 1e-3
