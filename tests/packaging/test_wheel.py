"""The wheel that the sdist makes: the three import packages, their data, the bundled pair, and nothing else."""

from __future__ import annotations

import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from .conftest import ROOT

pytestmark = pytest.mark.extended

PACKAGES = tuple(ROOT / p for p in ("mlx_specprefill", "server/mlx_specprefill_server", "server/mlx_specprefill_evals"))
MAX_BYTES = 20 * 2**20
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> ZipFile:
    return ZipFile(wheel_file)


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
        for path in [*top.rglob("*"), *(top / "demo").rglob("*"), *(top / "smollm2").rglob("*")]  # two are links
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert package_data <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("pair", ["smollm2", "demo"])
def test_the_pair_needs_nothing_from_a_clone(wheel: ZipFile, pair: str) -> None:
    names = {name.removeprefix("mlx_specprefill_server/") for name in wheel.namelist()}
    row = tomllib.loads(wheel.read("mlx_specprefill_server/pairs.toml").decode())[pair]
    beside = {value.removeprefix("./") for value in row.values() if isinstance(value, str) and value.startswith("./")}
    assert beside
    assert all(path in names or f"{path}/model.safetensors" in names for path in beside)


def test_the_pairs_that_are_for_tests_alone_stay_out_and_so_it_is_small(wheel: ZipFile, wheel_file: Path) -> None:
    assert not [name for name in wheel.namelist() if "/demo-" in name]
    assert wheel_file.stat().st_size < MAX_BYTES
    for page, words in (("guides/install.md", "One package"), ("decisions/0001-layout.md", "The wheel")):
        assert f"{words} ({wheel_file.stat().st_size / 1e6:.0f} MB" in (DOCS / page).read_text(encoding="utf-8")


def test_it_has_the_console_command(wheel: ZipFile) -> None:
    entry_points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "mlx-specprefill = mlx_specprefill_server.__main__:main" in wheel.read(entry_points).decode()
