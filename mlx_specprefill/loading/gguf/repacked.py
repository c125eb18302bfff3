"""Keeps the packed arrays of large GGUF files as safetensors, so that later loads read them at the disk's speed.

One file for each GGUF file and form of its arrays. It says which state of the GGUF file it was made from.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..._files import make_unsaved
from ..on_disk import REPACKED_FROM, files_state
from ..pieces import bring_into_memory

log = logging.getLogger(__name__)
_STATE = "state"
_VERSION = 1  # of the conversion: other arrays from the same file need another number
_SMALLEST = 256 << 20  # bytes of a GGUF file; smaller ones are converted in two seconds
_FREE = 10  # a tenth of the disk stays free


class Repacked:
    """The kept arrays of one GGUF file in one form.

    Args:
        folder: of the kept files; None: nothing is read or kept.
        source: the GGUF file.
        form: dtype of the scales and of what is not packed.
    """

    def __init__(self, folder: Path | None, source: Path, form: str) -> None:
        self._source = source.resolve()
        name = hashlib.blake2b(f"{self._source}\0{form}".encode(), digest_size=16).hexdigest()
        kept = folder is not None and self._source.stat().st_size >= _SMALLEST
        self._file = folder / f"{name}.safetensors" if folder is not None and kept else None
        self._state = f"{_VERSION}, {files_state(self._source)}" if kept else ""

    def read(self, on_progress: Callable[[int, int], None]) -> dict[str, mx.array] | None:
        """Return the arrays, in memory; None where they are not kept, of another state of the file, or damaged."""
        if self._file is None or not self._file.is_file():
            return None
        try:
            loaded: Any = mx.load(str(self._file), return_metadata=True)  # its type is that of every format
            arrays, metadata = loaded
            if metadata.get(_STATE) != self._state:
                return None
            bring_into_memory(arrays.values(), on_progress)
        except (OSError, ValueError, RuntimeError) as error:
            log.warning("%s can't be read, so the weights are repacked: %s", self._file, error)
            return None
        return dict(arrays)

    def keep(self, arrays: Mapping[str, mx.array]) -> None:
        """Write the arrays, which are in memory, while the caller goes on. Does without where the disk is full.

        The process ends when they are written: a daemon's return from MLX while Python ends would abort it. A file that
        a killed process left has another name and is written again.
        """
        if self._file is not None:
            threading.Thread(target=self._write, args=(self._file, dict(arrays))).start()

    def _write(self, file: Path, arrays: dict[str, mx.array]) -> None:
        part = file.with_suffix(".part.safetensors")  # MLX adds the ending to names without it
        try:
            make_unsaved(file.parent)
            with file.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._write_alone(file, part, arrays)
        except BlockingIOError:
            log.info("another process keeps the repacked weights of %s", self._source)
        except (OSError, ValueError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            log.warning("the repacked weights of %s are not kept: %s", self._source, error)

    def _write_alone(self, file: Path, part: Path, arrays: dict[str, mx.array]) -> None:
        for useless in (file, part):  # of an earlier state of the GGUF file, damaged, or not whole
            useless.unlink(missing_ok=True)
        disk = shutil.disk_usage(file.parent)
        if disk.free - sum(array.nbytes for array in arrays.values()) < disk.total // _FREE:
            log.info("no room in %s for the repacked weights of %s", file.parent, self._source)
            return
        mx.save_safetensors(str(part), arrays, {_STATE: self._state, REPACKED_FROM: str(self._source)})
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(file)
