"""The command line, whose MLX thread is told apart: a program for `python -P`, of whatever commit that imports.

The file that MODEL_TIME_FILE names gets the system's number of that thread (int64), and the processor time that it has
spent in models, MODEL_TYPE of mlx-lm, and in queueing their work (float64, seconds).
"""

import importlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_specprefill_server.cli import main


class Clock:
    """Of the calls that it wraps, but for those within another one, and those of the main thread."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(struct.pack("qd", 0, 0.0))
        with file.open("r+b") as opened:
            self._shared = mmap.mmap(opened.fileno(), 0)
        self._spent = 0.0
        self._inside = False

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any, **options: Any) -> Any:
            if self._inside or threading.current_thread() is threading.main_thread():
                return call(*arguments, **options)
            self._inside, begun = True, time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                self._inside = False
                self._spent += time.thread_time() - begun
                struct.pack_into("qd", self._shared, 0, threading.get_native_id(), self._spent)

        return measured


clock = Clock(Path(os.environ["MODEL_TIME_FILE"]))
model = importlib.import_module(f"mlx_lm.models.{os.environ['MODEL_TYPE']}").Model
model.__call__ = clock.wrap(model.__call__)
mx.async_eval, mx.eval = clock.wrap(mx.async_eval), clock.wrap(mx.eval)
main()
