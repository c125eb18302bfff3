"""Files that only their owner can read, because a prompt can be recovered from its cache."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["create_private", "make_private"]

FOLDER, FILE = 0o700, 0o600


def make_private(folder: Path, ours: Callable[[str], bool]) -> int:
    """Make the folder if it is missing, and close it and our files in it to other users.

    Args:
        ours: recognises our files by name; others are left unchanged.

    Returns:
        The number of them, the folder included, that were open to others.

    Raises:
        OSError: the folder can't be made or closed, because it belongs to somebody else or is meant for everybody.
    """
    folder.mkdir(mode=FOLDER, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.geteuid() or state.st_mode & stat.S_ISVTX:
        raise PermissionError(f"{folder} is not this user's alone, and prompts would lie in it; name another folder")
    mended = int(_close(folder, state.st_mode, FOLDER))
    with os.scandir(folder) as entries:
        for entry in entries:
            if ours(entry.name) and entry.is_file(follow_symlinks=False):
                mended += _close(Path(entry.path), entry.stat(follow_symlinks=False).st_mode, FILE)
    return mended


def create_private(path: Path) -> BinaryIO:
    """Open a new or emptied file for writing that only its owner can read, whatever the process's umask.

    Raises:
        OSError: as `open`.
    """
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, FILE))


def _close(path: Path, mode: int, wanted: int) -> bool:
    """Set the mode; return whether it changed."""
    if stat.S_IMODE(mode) == wanted:
        return False
    path.chmod(wanted)
    return True
