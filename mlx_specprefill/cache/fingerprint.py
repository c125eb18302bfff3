"""Keys of stored caches: the identity of the model that computed them, and digests of the tokens that they cover.

The identity of a model covers everything that changes its keys and values. The digest of a block covers the block and,
through the chain, every token before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from ..token_ids import TokenIds

__all__ = [
    "KV_LAYOUT_VERSION",
    "block_digest",
    "common_length",
    "model_identity",
    "root_digest",
    "token_bytes",
]

KV_LAYOUT_VERSION = (
    1  # of the arrays that `cache/prefix/records` makes of a prompt cache; a change orphans every stored record
)
DIGEST_BYTES = 24
_SAMPLES = 64  # elements of every parameter that enter the identity
_VOLATILE = ("_name_or_path", "transformers_version")  # do not change what a model computes
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def model_identity(model: nn.Module, config: Mapping[str, Any]) -> str:
    """What this model computes, as hexadecimal text: equal for two loads of one checkpoint, from any path.

    Covers the configuration, every parameter's name, shape and dtype (so quantisation and casts), 64 evenly spaced
    elements of each, the layout of stored caches and mlx-lm's minor version. Weights that differ only between the
    samples are not told apart; training or merging changes whole matrices.

    Args:
        config: what config.json held.
    """
    parameters: list[tuple[str, mx.array]] = sorted(nn.utils.tree_flatten(model.parameters()))
    samples = [_sample(array) for _, array in parameters]
    mx.eval(samples)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    settings = {key: value for key, value in config.items() if key not in _VOLATILE}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(f"\0{KV_LAYOUT_VERSION}\0{'.'.join(version('mlx-lm').split('.')[:2])}\0".encode())
    for (name, array), sample in zip(parameters, samples, strict=True):
        digest.update(f"{name}{array.shape}{array.dtype}\0".encode())
        digest.update(np.array(sample).tobytes())
    return digest.hexdigest()


def _sample(array: mx.array) -> mx.array:
    """At most 64 elements, evenly spaced and the last one among them, as unsigned integers of their size."""
    flat = array.reshape(-1)
    if flat.size > _SAMPLES:
        flat = flat[mx.array(np.linspace(0, flat.size - 1, _SAMPLES).astype(np.int64))]
    return flat.view(_BITS[flat.dtype.size]) if flat.size else flat.astype(mx.uint8)


def token_bytes(tokens: Sequence[int] | TokenIds) -> bytes:
    """Token ids as little-endian int32."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def root_digest(identity: str, block_size: int) -> bytes:
    """Parent of the first block: chains of two identities or two block sizes share no digest."""
    return hashlib.blake2b(f"{identity}\0{block_size}".encode(), digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, tokens: Sequence[int] | TokenIds) -> bytes:
    """Digest of a block after its parent's; the parent's length is fixed, so the two can't run into each other."""
    return hashlib.blake2b(parent + token_bytes(tokens), digest_size=DIGEST_BYTES).digest()


def common_length(tokens: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """How many tokens the two have in common from their start."""
    count = min(tokens.size, other.size)
    differing = np.flatnonzero(tokens[:count] != other[:count])
    return int(differing[0]) if differing.size else count
