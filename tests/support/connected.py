"""The output of `connect`, taken apart as its reader does it by hand."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

TITLE = re.compile(r"^# add to (?:~/)?(.*)\n", re.MULTILINE)


def files_in(printed: str) -> dict[str, str]:
    """Return the text for each file by its path, of the user's files in the home."""
    parts = TITLE.split(printed)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def paste(printed: str, home: Path) -> None:
    for name, text in files_in(printed).items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text, encoding="utf-8")


def variables_in(printed: str) -> dict[str, str]:
    """Return the variables of the command at the front, as a shell passes them to the agent."""
    command = TITLE.split(printed)[0].rstrip().rpartition("\n")[0] + "\nenv -0"
    said = subprocess.check_output(["sh", "-c", command], env={"PATH": "/usr/bin:/bin"}, text=True)
    found = dict(pair.split("=", 1) for pair in said.rstrip("\0").split("\0"))
    return {name: value for name, value in found.items() if name not in ("PATH", "PWD", "SHLVL", "_")}
