"""The release and its workflows: what can be held against this repository is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import release
import yaml

from .conftest import ROOT

WORKFLOWS = ROOT / ".github" / "workflows"
CHANGELOG = "# Changelog\n\n## Unreleased\n\n- next\n\n## 0.2.0 - 2026-12-01\n\n### Added\n\n- A thing.\n\n## 0.1.0\n\n"


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_a_versions_notes_are_its_section() -> None:
    assert release.notes("0.2.0", CHANGELOG) == "### Added\n\n- A thing."
    for missing in ("0.1.0", "0.3.0", "0.2"):
        with pytest.raises(release.ReleaseError, match="has no section"):
            release.notes(missing, CHANGELOG)


def test_a_tag_of_another_version_is_refused() -> None:
    release.check("v0.2.0", "0.2.0", CHANGELOG)
    with pytest.raises(release.ReleaseError, match=r"the tag has to be v0\.2\.0"):
        release.check("v0.3.0", "0.2.0", CHANGELOG)


def test_wheels_for_macs_are_counted_and_a_missing_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for uv, which has none for Python 3.14."""
    uv = tmp_path / "uv"
    told = '[ "$MACOSX_DEPLOYMENT_TARGET" = 14.0 ] || exit 3\necho "$@" >>"$0.calls"\n'
    uv.write_text(f'#!/bin/sh\n{told}case "$*" in *3.14*) echo no wheel >&2; exit 1 ;; esac\necho a==1\necho b==2\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SystemExit, match=r"release\.py: Python 3\.14 on macOS 14\.0: no wheel"):
        release.main(["wheels"])
    assert capsys.readouterr().out.count(": 2 wheels for macOS 14.0 on arm64\n") == 3
    calls = (tmp_path / "uv.calls").read_text()
    assert calls.count("--python-platform aarch64-apple-darwin") == calls.count("--only-binary :all:") == 4


def test_a_release_needs_wheels_for_macs() -> None:
    steps = parsed(WORKFLOWS / "release.yml")["jobs"]["build"]["steps"]
    assert any("scripts/release.py wheels" in step.get("run", "") for step in steps)


def test_on_a_mac_only_the_suite_on_metal_may_fail() -> None:
    job = parsed(WORKFLOWS / "ci.yml")["jobs"]["mac"]
    runs = {row["run"].split("&& ")[-1]: row["may_fail"] for row in job["strategy"]["matrix"]["include"]}
    assert runs == {
        "scripts/test --all --device cpu": False,
        "mlx-specprefill doctor --compute --json doctor.json": False,
        "scripts/test --all": True,
    }
    assert job["continue-on-error"] == "${{ matrix.may_fail }}"


def test_the_version_is_read_without_importing_anything() -> None:
    assert release.version_of('x = 1\n__version__ = "1.2.3"\n') == "1.2.3"
    with pytest.raises(release.ReleaseError):
        release.version_of("")


def test_nothing_is_published_that_was_not_tried_on_linux_and_macos() -> None:
    jobs = parsed(WORKFLOWS / "release.yml")["jobs"]
    assert jobs["publish"]["needs"] == "try"
    assert jobs["try"]["needs"] == "build"
    systems = {system.split("-")[0] for system in jobs["try"]["strategy"]["matrix"]["os"]}
    assert systems == {"ubuntu", "macos"}
    assert {name for name, job in jobs.items() if "permissions" in job} == {"publish"}


def test_the_workflows_call_what_there_is() -> None:
    called = {
        match
        for path in WORKFLOWS.glob("*.yml")
        for match in re.findall(r"(?:scripts/[\w.]+|\.ci/\w+)", path.read_text(encoding="utf-8"))
    }
    assert {".ci/run", "scripts/release.py", "scripts/try_install.py"} <= called
    assert all((ROOT / path).is_file() for path in called)
