"""Replaces a file atomically: a reader finds the old content or the new one."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["replace_text"]


def replace_text(file: Path, text: str) -> None:
    """Replace the file's content. Makes its folder if it is missing.

    Raises:
        OSError: it can't be written.
    """
    new = file.with_name(f"{file.name}.{os.getpid()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    new.write_text(text, encoding="utf-8")
    new.replace(file)
