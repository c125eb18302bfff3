"""The wheel: the three import packages, their data, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(ROOT / p for p in ("mlx_specprefill", "server/mlx_specprefill_server", "server/mlx_specprefill_evals"))
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """Built from a copy, since setuptools writes next to what it builds."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ("mlx_specprefill", "server", "models"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "model.safetensors")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    subprocess.run([sys.executable, "-c", BUILD, str(source)], cwd=source, check=True, capture_output=True)
    return ZipFile(next(source.glob("*.whl")))


def modules(top: Path) -> set[str]:
    return {str(path.relative_to(top.parent)) for path in top.rglob("*.py")}


def test_it_holds_every_module_and_nothing_else(wheel: ZipFile) -> None:
    expected = {module for package in PACKAGES for module in modules(package)}
    assert {name for name in wheel.namelist() if name.endswith(".py")} == expected


def test_its_top_level_is_the_packages(wheel: ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {package.name for package in PACKAGES}


def test_it_holds_the_data_files_and_the_licence(wheel: ZipFile) -> None:
    names = set(wheel.namelist())
    package_data = {
        str(path.relative_to(top.parent))
        for top in PACKAGES
        for path in top.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert package_data <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_pair_smollm2_needs_nothing_from_a_clone(wheel: ZipFile) -> None:
    names = {name.removeprefix("mlx_specprefill_server/") for name in wheel.namelist()}
    row = tomllib.loads(wheel.read("mlx_specprefill_server/pairs.toml").decode())["smollm2"]
    beside = {value.removeprefix("./") for value in row.values() if isinstance(value, str) and value.startswith("./")}
    assert beside
    assert beside <= names


def test_it_has_the_console_command(wheel: ZipFile) -> None:
    entry_points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "mlx-specprefill = mlx_specprefill_server.cli:main" in wheel.read(entry_points).decode()
