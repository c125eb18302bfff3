#!/usr/bin/env python3
"""Steps of the release workflow; tests run them.

    scripts/release.py check v0.1.0          is the tag the version, and does the changelog have a section for it?
    scripts/release.py wheels                has every dependency a wheel for macOS 14 on arm64? uv asks the index
    scripts/release.py notes 0.1.0           that section, as the release's text

A release: give the changelog's newest section its date, set `__version__`, commit, tag, push the tag.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLDEST_MACOS = "14.0"


class ReleaseError(Exception):
    """The release can't be made. The message says what to change."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check").add_argument("tag")
    commands.add_parser("wheels")
    commands.add_parser("notes").add_argument("version")
    options = parser.parse_args(arguments)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        if options.command == "check":
            check(options.tag, version_of((ROOT / "mlx_specprefill" / "__init__.py").read_text("utf-8")), changelog)
        elif options.command == "wheels":
            for python in PYTHONS:
                print(f"Python {python}: {wheels(python)} wheels for macOS {OLDEST_MACOS} on arm64")
        else:
            print(notes(options.version, changelog))
    except ReleaseError as error:
        sys.exit(f"release.py: {error}")


def version_of(source: str) -> str:
    """Return `__version__` of the library's source without importing it."""
    found = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if found is None:
        raise ReleaseError("mlx_specprefill/__init__.py has no __version__")
    return found[1]


def check(tag: str, version: str, changelog: str) -> None:
    """Raise ReleaseError if tag, version and changelog don't agree."""
    if tag != f"v{version}":
        raise ReleaseError(f"the tag is {tag}, but __version__ is {version}: the tag has to be v{version}")
    notes(version, changelog)


def notes(version: str, changelog: str) -> str:
    """Return the changelog's section of a version, without its heading.

    Raises:
        ReleaseError: there is none, or it is empty.
    """
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, text = section.partition("\n")
        if re.fullmatch(rf"\[?{re.escape(version)}\]?( - \d{{4}}-\d\d-\d\d)?", heading.strip()) and text.strip():
            return text.strip()
    raise ReleaseError(f"CHANGELOG.md has no section `## {version} - YYYY-MM-DD` with text in it")


def wheels(python: str) -> int:
    """Return how many packages an installation takes on a Mac with that Python. None of them may need a compiler.

    Raises:
        ReleaseError: one of them has no wheel, or uv is missing.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise ReleaseError("uv is needed: pip install uv")
    asked = ("--python-platform", "aarch64-apple-darwin", "--python-version", python, "--only-binary", ":all:")
    command = [uv, "pip", "compile", "pyproject.toml", *asked, "--no-header", "--no-annotate"]
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": OLDEST_MACOS}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"Python {python} on macOS {OLDEST_MACOS}: {done.stderr.strip()}")
    return len(done.stdout.split())


if __name__ == "__main__":
    main()
