"""The sdist, built from a copy of what git tracks, and the wheel that is built from that sdist alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"


def build(kind: str, source: Path, out: Path) -> Path:
    before = set(out.iterdir())
    subprocess.run([sys.executable, "-c", BUILD.format(kind), str(out)], cwd=source, check=True, capture_output=True)
    [made] = set(out.iterdir()) - before
    return made


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes next to what it builds; links stay links."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ("mlx_specprefill", "server", "models"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "demo-*")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore, symlinks=True)
    return build("sdist", source, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def wheel_file(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    [source] = unpacked.iterdir()
    return build("wheel", source, sdist.parent)
