"""Keep a Mac awake while requests run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

_LINGER_S = 10.0  # after the last request: an agent's next turn often comes at once


class Awake:
    """A process of macOS's `caffeinate`, from the first request until some seconds after the last. None on other
    systems.
    """

    def __init__(self) -> None:
        self._program = shutil.which("caffeinate") if sys.platform == "darwin" else None
        self._process: subprocess.Popen[bytes] | None = None
        self._until = 0.0

    def note(self, busy: bool) -> None:
        """Start or end the process. `busy` means that requests are running."""
        if self._program is None:
            return
        now = time.monotonic()
        if busy:
            self._until = now + _LINGER_S
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen([self._program, "-i", "-w", str(os.getpid())])
        elif now >= self._until:
            self.end()

    def end(self) -> None:
        """Let the machine sleep again."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()
