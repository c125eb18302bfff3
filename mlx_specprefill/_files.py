"""Files: the limit on open ones, JSON objects, atomic replacement, and folders that are not backed up."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
_MLX_LM_LIMITS = (2048, 4096)
_WANTED = 2048  # open files: checkpoints have many shards, and the usual limit of macOS is 256


def raise_file_limit() -> None:
    """Raise the soft limit as mlx-lm would as far as the hard limit allows, and leave out mlx-lm's own call.

    mlx-lm's import sets the limit to 2048 and the hard limit to 4096. That raises if the hard limit is lower, and
    lowers it if it is higher.
    """
    change = resource.setrlimit

    def leave_out(kind: int, limits: tuple[int, int]) -> None:
        if (kind, limits) == (resource.RLIMIT_NOFILE, _MLX_LM_LIMITS):
            resource.setrlimit = change
        else:
            change(kind, limits)

    if "mlx_lm" not in sys.modules:
        resource.setrlimit = leave_out
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        change(resource.RLIMIT_NOFILE, (wanted, hard))


def make_unsaved(folder: Path, mode: int = 0o777) -> None:
    """Make the folder if it is missing, and keep a new one out of Time Machine.

    Raises:
        OSError: it can't be made.
    """
    is_new = not folder.exists()
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    if is_new and sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):  # a backup that is larger does no harm
            subprocess.run(("/usr/bin/tmutil", "addexclusion", str(folder)), capture_output=True, timeout=10)


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. It is empty if there is none, or, with a warning, if it can't be read."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        log.warning("%s can't be read: its values are learnt anew", file)
        return {}
    return content if isinstance(content, dict) else {}


def replace_text(file: Path, text: str) -> None:
    """Replace the file's content, as `replace_file`."""
    replace_file(file, lambda new: new.write_text(text, encoding="utf-8"))


def replace_file(file: Path, write: Callable[[Path], object]) -> None:
    """Replace a file by what `write` writes to another one. Makes its folder if it is missing.

    Raises:
        OSError: it can't be written.
    """
    new = file.with_name(f"{os.getpid()}.{file.name}")  # with the ending that `write` may look at
    file.parent.mkdir(parents=True, exist_ok=True)
    write(new)
    new.replace(file)
