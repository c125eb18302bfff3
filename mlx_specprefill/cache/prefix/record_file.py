"""Writes and reads one record as a safetensors file, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

__all__ = ["Data", "Part", "as_bytes", "checksum", "decode", "encode", "read_into"]

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
# Types that numpy has and passes on bit for bit. Other types are stored as integers.
_AS_THEY_ARE = {"U8": "u1", "U16": "<u2", "U32": "<u4", "I32": "<i4", "F16": "<f2", "F32": "<f4"}
Data = bytes | memoryview
Part = Data | npt.NDArray[np.generic]
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def as_bytes(part: Part) -> Data:
    return part.data if isinstance(part, np.ndarray) else part


def read_into(path: Path, buffer: bytearray) -> memoryview:
    """Return a file's bytes, in the buffer if they fit, else in a new one, which is the result's `obj`.

    Raises:
        OSError: it can't be read.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        view = memoryview(buffer if len(buffer) >= size else bytearray(size))
        done = 0
        while done < size and (count := file.readinto(view[done:size])):
            done += count
    return view[:done]


def checksum(parts: Sequence[Part], size: int = 32) -> bytes:
    """Return a digest of `size` bytes: 32, or 24 in files of earlier versions."""
    # Processors have instructions for SHA-256; it takes a fraction of BLAKE2's time.
    digest = hashlib.sha256() if size == hashlib.sha256().digest_size else hashlib.blake2b(digest_size=size)
    for part in parts:
        digest.update(as_bytes(part))
    return digest.digest()


def encode(arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> list[Part]:
    """Return a safetensors file in parts: header, then one flat array of unsigned integers per array."""
    header: dict[str, Any] = {"__metadata__": {"format": _FORMAT, "version": str(VERSION), **metadata}}
    parts: list[Part] = []
    offset = 0
    flat = {name: array.reshape(-1).view(_BITS[array.dtype.size]) for name, array in arrays.items() if array.size}
    mx.eval(flat)  # together: each call waits for the device
    for name, array in arrays.items():
        raw = np.array(flat[name]) if array.size else np.zeros(0, np.uint8)
        offsets = [offset, offset + raw.nbytes]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        offset += raw.nbytes
        parts.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *parts]


def decode(data: Data, metadata: Mapping[str, str]) -> dict[str, mx.array]:
    """Return the arrays of a file from `encode`.

    Raises:
        ValueError: it was made for another record, by another version, or not by us.
        KeyError: as ValueError.
    """
    (size,) = struct.unpack_from("<Q", data) if len(data) >= 8 else (0,)
    header = json.loads(bytes(data[8 : 8 + size]))
    said = header.pop("__metadata__")
    if said != {"format": _FORMAT, "version": str(VERSION), **metadata}:
        raise ValueError(f"it belongs elsewhere: {said}")
    return {name: _array(data, 8 + size, spec) for name, spec in header.items()}


def _array(data: Data, base: int, spec: Mapping[str, Any]) -> mx.array:
    dtype = _DTYPES[spec["dtype"]]
    start, end = spec["data_offsets"]
    own = _AS_THEY_ARE.get(spec["dtype"])
    bits = np.dtype(own or f"<u{dtype.size}")
    raw = np.frombuffer(data, dtype=bits, count=(end - start) // dtype.size, offset=base + start)
    array = mx.array(raw.reshape(spec["shape"]))
    return array if own else array.view(dtype)
