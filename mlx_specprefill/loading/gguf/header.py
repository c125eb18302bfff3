"""Reads a GGUF file's metadata and the places of its tensors, without trusting the file.

Every count and length is compared with the bytes left in the file before anything of that size is read or built, so a
short file that claims to be long costs nothing. Only little-endian files of versions 2 and 3 exist in practice.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.quants import dequantize

from ...errors import LoadError

MAX_HEADER = 1 << 26  # bytes; a vocabulary of 262 144 tokens with scores takes 7 MB
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_NUMBERS = {kind: np.dtype(each).newbyteorder("<") for kind, each in GGUFReader.gguf_scalar_to_np.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape` has the rows first, as arrays have it; `start` counts bytes from the file's beginning."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int

    @property
    def block_bytes(self) -> int:
        return GGML_QUANT_SIZES[self.kind][1]

    @property
    def blocks(self) -> int:
        return self.nbytes // self.block_bytes

    def read(self, file: BinaryIO, first: int, last: int) -> npt.NDArray[np.uint8]:
        """Read the blocks from `first` to before `last`, (blocks, bytes of a block) uint8. Any thread may.

        Raises:
            LoadError: the file has become shorter.
        """
        wanted = (last - first) * self.block_bytes
        data = os.pread(file.fileno(), wanted, self.start + first * self.block_bytes)
        if len(data) < wanted:
            raise LoadError(f"the file ends within tensor {shorten(self.name)}")
        return np.frombuffer(data, dtype=np.uint8).reshape(last - first, -1)


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata by key (numbers, truth values, text and lists of them), tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def shorten(value: object) -> str:
    """Format a value from the file for a one-line message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]}..."


def read_header(path: Path) -> Header:
    """Read the metadata and tensor table of a GGUF file. Reads no tensor.

    Raises:
        LoadError: the file is not GGUF, is cut off, or is inconsistent.
        OSError: it can't be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        reader = _Reader(file, min(size, MAX_HEADER), cut=size > MAX_HEADER)
        tensor_count, entry_count = _counts(reader)
        metadata = _metadata(reader, entry_count)
        table = [_tensor(reader) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise LoadError(f"general.alignment is {shorten(alignment)}, not a power of two")
    begin = -(-reader.position // alignment) * alignment
    placed = [_locate(info, begin, size) for info in table]
    _check_apart(placed)
    return Header(metadata, {info.name: info for info in placed})


class _Reader:
    """Reads a file once from its start, at most to its end or the limit."""

    def __init__(self, file: BinaryIO, limit: int, *, cut: bool) -> None:
        self.position, self._file, self._limit, self._cut = 0, file, limit, cut

    def take(self, count: int, what: str) -> bytes:
        """Return the next bytes."""
        data = self._file.read(count) if count <= self._limit - self.position else b""
        if len(data) < count:
            why = f"is larger than {MAX_HEADER >> 20} MiB" if self._cut else "is cut off"
            raise LoadError(f"its header {why} (in {what})")
        self.position += count
        return data

    def number(self, layout: str, what: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]

    def text(self, what: str) -> str:
        """Read a string: its length in eight bytes, then UTF-8."""
        try:
            return self.take(self.number("<Q", what), what).decode()
        except UnicodeDecodeError:
            raise LoadError(f"{what} is not UTF-8") from None

    def value(self, kind: int, what: str) -> Any:
        """Read one metadata value of a stored type."""
        if kind == GGUFValueType.STRING:
            return self.text(what)
        if kind == GGUFValueType.ARRAY:
            return self._array(what)
        if kind not in _NUMBERS:
            raise LoadError(f"{what} has the unknown type {kind}")
        return self._numbers(GGUFValueType(kind), 1, what)[0]

    def _array(self, what: str) -> list[Any]:
        kind, count = self.number("<I", what), self.number("<Q", what)
        if kind == GGUFValueType.STRING:
            return [self.text(what) for _ in range(count)]
        if kind not in _NUMBERS:
            raise LoadError(f"{what} is an array of the unsupported type {kind}")
        return self._numbers(GGUFValueType(kind), count, what)

    def _numbers(self, kind: GGUFValueType, count: int, what: str) -> list[Any]:
        stored = _NUMBERS[kind]
        listed: list[Any] = np.frombuffer(self.take(count * stored.itemsize, what), stored).tolist()
        return listed


def _counts(reader: _Reader) -> tuple[int, int]:
    """Read the numbers of tensors and metadata entries."""
    if reader.take(4, "the first bytes") != _MAGIC:
        raise LoadError("not a GGUF file (it doesn't start with 'GGUF')")
    version = reader.number("<I", "the version")
    if version not in _VERSIONS:
        raise LoadError(f"GGUF version {version} is not supported, only 2 and 3 (little-endian)")
    return reader.number("<Q", "the tensor count"), reader.number("<Q", "the metadata count")


def _metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = reader.text("a metadata key")
        if key in metadata:
            raise LoadError(f"it has {shorten(key)} twice")
        metadata[key] = reader.value(reader.number("<I", shorten(key)), shorten(key))
    return metadata


def _tensor(reader: _Reader) -> TensorInfo:
    """Read an entry of the tensor table; `start` is still relative to the data section."""
    name = reader.text("a tensor's name")
    what = f"tensor {shorten(name)}"
    dimensions = reader.number("<I", what)
    shape = struct.unpack(f"<{dimensions}Q", reader.take(8 * dimensions, what))[::-1]
    number, start = reader.number("<I", what), reader.number("<Q", what)
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise LoadError(f"{what} has the unknown type {number}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or 0 in shape or shape[-1] % block:
        raise LoadError(f"{what} has the shape {shape}, which {kind.name} can't have")
    return TensorInfo(name, shape, kind, start, math.prod(shape) // block * block_bytes)


def _locate(info: TensorInfo, begin: int, size: int) -> TensorInfo:
    """Return the entry with its place in the file."""
    start = begin + info.start
    if start + info.nbytes > size:
        raise LoadError(f"tensor {shorten(info.name)} lies behind the end of the file, which is cut off or corrupt")
    if not _is_decodable(info.kind):
        raise LoadError(f"tensor {shorten(info.name)} has the type {info.kind.name}, which can't be read")
    return TensorInfo(info.name, info.shape, info.kind, start, info.nbytes)


def _check_apart(tensors: list[TensorInfo]) -> None:
    """Check that no name occurs twice and no tensors overlap: a small file can't pass for a large model."""
    if len({info.name for info in tensors}) < len(tensors):
        raise LoadError("it has two tensors of one name")
    end = 0
    for info in sorted(tensors, key=lambda info: info.start):
        if info.start < end:
            raise LoadError(f"tensor {shorten(info.name)} overlaps another")
        end = info.start + info.nbytes


def _is_decodable(kind: GGMLQuantizationType) -> bool:
    """Return whether the gguf package can decode this type."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True
