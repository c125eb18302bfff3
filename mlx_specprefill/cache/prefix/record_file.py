"""One record as a safetensors file, and back, bit for bit."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

__all__ = ["Part", "as_bytes", "checksum", "decode", "encode"]

VERSION = 1
_FORMAT = "mlx-specprefill-prefix"
_BITS: dict[int, Any] = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_DTYPES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F64": mx.float64,
    "C64": mx.complex64,
}
Part = bytes | npt.NDArray[np.generic]
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def as_bytes(part: Part) -> bytes | memoryview:
    return part if isinstance(part, bytes) else part.data


def checksum(parts: Sequence[Part]) -> bytes:
    digest = hashlib.blake2b(digest_size=24)
    for part in parts:
        digest.update(as_bytes(part))
    return digest.digest()


def encode(arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> list[Part]:
    """A safetensors file in parts: header, then one flat array of unsigned integers per array."""
    header: dict[str, Any] = {"__metadata__": {"format": _FORMAT, "version": str(VERSION), **metadata}}
    parts: list[Part] = []
    offset = 0
    for name, array in arrays.items():
        raw = np.array(array.reshape(-1).view(_BITS[array.dtype.size])) if array.size else np.zeros(0, np.uint8)
        offsets = [offset, offset + raw.nbytes]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        offset += raw.nbytes
        parts.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *parts]


def decode(data: bytes, metadata: Mapping[str, str]) -> dict[str, mx.array]:
    """The arrays of a file that `encode` made.

    Raises:
        ValueError: it was made for another record, by another version, or not by us.
        KeyError: as ValueError.
    """
    (size,) = struct.unpack_from("<Q", data) if len(data) >= 8 else (0,)
    header = json.loads(data[8 : 8 + size])
    said = header.pop("__metadata__")
    if said != {"format": _FORMAT, "version": str(VERSION), **metadata}:
        raise ValueError(f"it belongs elsewhere: {said}")
    return {name: _array(data, 8 + size, spec) for name, spec in header.items()}


def _array(data: bytes, base: int, spec: Mapping[str, Any]) -> mx.array:
    dtype = _DTYPES[spec["dtype"]]
    start, end = spec["data_offsets"]
    count = (end - start) // dtype.size
    bits = np.dtype(f"<u{dtype.size}")
    raw = mx.array(np.frombuffer(data, dtype=bits, count=count, offset=base + start))
    return raw.view(dtype).reshape(spec["shape"])
