"""Names of what is stored: a model's identity, digests of blocks, and labels in file names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...request import SHARED, CacheLabel, TokenIds
from .selection_key import SelectionKey

KV_LAYOUT_VERSION = 1  # of the arrays from `records`; a change orphans every stored record
DIGEST_BYTES = 24
LABEL_MARK = "@"  # between an identity and a label, neither of which contains it
_SAMPLES = 64  # elements of every parameter that enter the identity
_VOLATILE = ("_name_or_path", "transformers_version")  # no effect on the model's results
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def model_identity(model: nn.Module, config: Mapping[str, Any]) -> str:
    """Return the model's identity as hexadecimal text: equal for two loads of one checkpoint, from any path.

    Covers the configuration, every parameter's name, shape and dtype (so quantisation and casts), 64 evenly spaced
    elements of each, the layout of stored caches and mlx-lm's minor version. Weights that differ only between the
    samples have the same identity; training or merging changes whole matrices.

    Args:
        config: the contents of config.json.
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
    """Return at most 64 elements, evenly spaced and with the last one, as unsigned integers of their size."""
    flat = array.reshape(-1)
    if flat.size > _SAMPLES:
        flat = flat[mx.array(np.linspace(0, flat.size - 1, _SAMPLES).astype(np.int64))]
    return flat.view(_BITS[flat.dtype.size]) if flat.size else flat.astype(mx.uint8)


def token_bytes(tokens: Sequence[int] | TokenIds) -> bytes:
    """Return token ids as little-endian int32."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def labelled(name: str, label: CacheLabel) -> str:
    """Return a model's name with the label, which is unique per label."""
    return name if label == SHARED else f"{name}{LABEL_MARK}{label.owner}/{label.salt}"


def label_of(name: str) -> CacheLabel:
    """Return the label in a name from `labelled`."""
    owner, _, salt = name.partition(LABEL_MARK)[2].partition("/")
    return CacheLabel(owner, salt)


def block_digest(
    parent: bytes,
    tokens: Sequence[int] | TokenIds,
    selection_key: SelectionKey | None = None,
    positions: TokenIds | None = None,
) -> bytes:
    """Return the digest of a block after its parent's. The parent's length is fixed, so no two inputs are equal.

    Args:
        selection_key, positions: of a sparse one.
    """
    digest = hashlib.blake2b(parent + token_bytes(tokens), digest_size=DIGEST_BYTES).digest()
    if selection_key is None or positions is None:
        return digest
    chosen = str(selection_key).encode() + b"\0" + token_bytes(positions)
    return hashlib.blake2b(digest + chosen, digest_size=DIGEST_BYTES).digest()
