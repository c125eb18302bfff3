"""A record's file: safetensors whose head says all that is known of it, with checksums of head and arrays."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx

from .layout import Arrays

VERSION = 2
_FORMAT = {"format": "mlx-specprefill-prefix", "version": str(VERSION)}
_SIZE = 8  # bytes before the head of a safetensors file: its length, little-endian
_MOST = 1 << 27  # bytes of a head
_SAID = b'"__metadata__":'  # the places of arrays, which stand beside it, take five times as long to parse
_CLAIM = b'"checksums":"'  # of the head with _BLANK in their place, and of the arrays
_HEX = 2 * hashlib.sha256().digest_size
_BLANK = b"-" * 2 * _HEX


@dataclass(frozen=True, slots=True)
class DiskRow:
    """A record without its arrays, as the head of its file describes it.

    Attributes:
        key: hexadecimal, unique over all namespaces; "-state" at its end marks a state.
        parent: the key of the block before it.
        tokens: its own token ids, little-endian int32 in hexadecimal; empty for a state.
        end: tokens from the start of the prompt to its end.
        array_bytes: bytes of its arrays in memory.
        pinned: evicted last, while pinned records take at most half of the limit. Once written, its folder says it.
        selection_key: of a sparse block, as text; None: it is dense, or a state.
        positions: of a sparse block, as `tokens`.
    """

    key: str
    namespace: str
    parent: str
    tokens: str
    end: int
    array_bytes: int
    pinned: bool = False
    selection_key: str | None = None
    positions: str = ""


def encode(row: DiskRow, arrays: Arrays) -> io.BytesIO:
    """Return a safetensors file that `seal` has to complete."""
    file = io.BytesIO()
    mx.save_safetensors(file, arrays, {**_FORMAT, "row": json.dumps(asdict(row)), "checksums": _BLANK.decode()})
    return file


def seal(file: io.BytesIO) -> None:
    """Write the checksums into a file from `encode`."""
    with file.getbuffer() as content:
        size = _SIZE + int.from_bytes(content[:_SIZE], "little")
        head = bytes(content[:size])
        at = head.index(_CLAIM) + len(_CLAIM)
        content[at : at + len(_BLANK)] = (_checksum(head) + _checksum(content[size:])).encode()


def read_row(file: io.BufferedReader) -> tuple[DiskRow, str]:
    """Return the record that a file's head describes, and the checksum of the arrays, which follow in the file.

    Raises:
        ValueError: the head is damaged, of another version, or not ours.
        OSError: it can't be read.
    """
    size = file.read(_SIZE)
    head = size + file.read(min(int.from_bytes(size, "little"), _MOST))
    before, mark, behind = head.partition(_CLAIM)
    claim, behind = behind[: len(_BLANK)], behind[len(_BLANK) :]
    if _checksum(before + mark + _BLANK + behind).encode() != claim[:_HEX]:
        raise ValueError("it is damaged, or of another version")
    said, _ = json.JSONDecoder().raw_decode(head.partition(_SAID)[2].decode())
    if not _FORMAT.items() <= said.items():
        raise ValueError(f"it has version {said['version']}")
    return DiskRow(**json.loads(said["row"])), claim[_HEX:].decode()


def check(file: io.BufferedReader, key: str, namespace: str) -> None:
    """Read a whole file.

    Raises:
        ValueError: it is damaged, or holds another record.
        OSError: it can't be read.
    """
    row, checksum = read_row(file)
    if (row.key, row.namespace) != (key, namespace):
        raise ValueError(f"it belongs elsewhere: {row.key} in {row.namespace}")
    if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
        raise ValueError("its arrays are damaged")


def load(path: Path) -> Arrays:
    """Return the arrays of a file that `check` has passed.

    Raises:
        RuntimeError: it can't be read.
    """
    arrays: Arrays = mx.load(str(path))  # type: ignore[assignment]
    mx.eval(arrays)
    return arrays


def _checksum(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
