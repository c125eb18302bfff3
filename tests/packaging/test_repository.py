"""Rules for the repository's files."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_specprefill_server.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
OUR_DOT_FOLDERS = {".ci", ".github"}
NOT_OURS = {"runs", "build", "dist", "__pycache__"}
# Written in two halves, so that this file does not contain what it forbids.
REGISTRIES = ("py" + "pi.org", "python" + "hosted.org", "registry.npm" + "js.org", "deb.deb" + "ian.org")


def is_foreign(folder: str) -> bool:
    return folder.startswith(".") or folder in NOT_OURS or folder.endswith(".egg-info")


def our_files() -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name in OUR_DOT_FOLDERS or not is_foreign(name)]
        for name in names:
            yield Path(folder, name)


def our_texts() -> Iterator[tuple[Path, str]]:
    for path in our_files():
        data = path.read_bytes()
        if b"\0" not in data[:4096]:
            yield path.relative_to(ROOT), data.decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    "name", ["scripts/serve", "scripts/test", "scripts/check", "scripts/docs", "scripts/bench", ".ci/run"]
)
def test_the_verbs_are_executable_shell_scripts(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    assert (ROOT / name).read_text().startswith("#!/bin/sh\n")


def test_what_begins_like_a_program_has_the_run_bit() -> None:
    programs = [path for path in (ROOT / "scripts").rglob("*") if path.is_file() and path.read_bytes()[:2] == b"#!"]
    assert len(programs) > 5
    assert [path.name for path in programs if not os.access(path, os.X_OK)] == []


def test_ci_calls_the_same_scripts() -> None:
    assert ".ci/run" in (ROOT / ".github/workflows/ci.yml").read_text()
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [line.split()[0] for line in lines if line.startswith("scripts/")] == [
        "scripts/test",  # as a newcomer runs it, before anything else is installed
        "scripts/check",
        "scripts/test",
        "scripts/test",  # in rounded arithmetic
        "scripts/docs",
    ]


def test_no_file_names_a_package_registry() -> None:
    named = [str(path) for path, text in our_texts() if any(host in text for host in REGISTRIES)]
    assert named == []


def test_no_file_holds_a_path_of_the_machine_it_was_written_on() -> None:
    here = [f"{ROOT}/", f"{ROOT.parent}/", f"{Path.home()}/"]
    places = [place for place in here if place.count("/") > 2]  # "/" or "/app/" would match ordinary text
    named = [str(path) for path, text in our_texts() if any(place in text for place in places)]
    assert named == []


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for path, text in our_texts():
        if path.suffix == ".md":
            targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
            broken += [f"{path}: {target}" for target in targets if not (ROOT / path.parent / target).exists()]
    assert broken == []


def test_every_command_that_is_named_exists() -> None:
    named = re.compile(r"(?:`|, )mlx-specprefill ([a-z]+)\b")
    words = {word for path, text in our_texts() if path.parts[0] != "tests" for word in named.findall(text)}
    assert len(words) > 5
    assert words - COMMANDS.keys() == set()


def test_what_the_project_file_promises() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "mlx-specprefill"
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
    assert project["scripts"] == {"mlx-specprefill": "mlx_specprefill_server.__main__:main"}
    pinned = [line for line in project["dependencies"] if line.startswith("mlx")]
    assert len(pinned) == 3
    assert all(re.match(r"mlx(\[cpu\]|-lm)?==\d+\.\d+\.\*", line) for line in pinned)
