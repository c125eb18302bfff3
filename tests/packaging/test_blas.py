"""The BLAS preload, in fresh interpreters: which library is mapped, not how fast it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_specprefill import _blas

pytestmark = pytest.mark.extended

LINUX = sys.platform.startswith("linux")
REPORT = """
import json
{before}
import mlx_specprefill
import mlx.core
status = mlx_specprefill.BLAS
try:
    maps = open("/proc/self/maps").read()
except OSError:
    maps = ""
mapped = [name for name in ("openblas", "mkl_rt") if "/lib" + name in maps]
print(json.dumps([status.state, status.library, status.notice, mapped]))
"""


def report(choice: str, before: str = "") -> tuple[str, str | None, str | None, list[str]]:
    """Import the library in a new process; what it says it did, and which fast BLAS that process maps.

    NumPy carries a private OpenBLAS under another file name (libscipy_openblas*), which does not count.
    """
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", REPORT.format(before=before)],
        env={**clean, "MLX_SPECPREFILL_BLAS": choice},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    state, library, notice, mapped = json.loads(done.stdout)
    return state, library, notice, mapped


def test_a_cuda_build_is_known_by_its_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the CPU's wheel is there, too, its file may be the one that is loaded."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not _blas._cuda_build()
    (tmp_path / "mlx_cuda_13-0.32.4.dist-info").mkdir()
    assert _blas._cuda_build()
    (tmp_path / "mlx_cpu-0.32.4.dist-info").mkdir()
    assert not _blas._cuda_build()


def test_off_loads_nothing() -> None:
    state, library, notice, mapped = report("off")
    assert state == ("off" if LINUX else "not-needed")
    assert (library, notice, mapped) == (None, None, [])


def test_auto_loads_a_fast_library_before_mlx_or_says_what_to_install() -> None:
    state, _, notice, mapped = report("auto")
    if not LINUX:
        assert (state, notice) == ("not-needed", None)
    elif mapped:
        assert (state, notice) == ("loaded", None)
    else:
        assert state == "missing"
        assert notice is not None
        assert "libopenblas0-pthread" in notice


def test_a_named_library_that_is_not_there_is_reported_and_does_not_raise() -> None:
    state, _, notice, mapped = report("/nonexistent/libfast.so")
    assert mapped == []
    if LINUX:
        assert state == "failed"
        assert notice is not None
        assert "/nonexistent/libfast.so" in notice


def test_mlx_imported_first_is_too_late() -> None:
    state, _, notice, mapped = report("auto", before="import mlx.core")
    assert mapped == []
    if LINUX:
        assert state == "too-late"
        assert notice is not None


class Resolver:
    """Stands for ctypes.CDLL: knows some libraries and what they export."""

    def __init__(self, libraries: dict[str, set[str]]) -> None:
        self.libraries = libraries
        self.made_global: list[str] = []

    def __call__(self, name: str | None, mode: int = 0) -> object:
        if name is None:
            return object()
        if name not in self.libraries:
            raise OSError(f"{name}: cannot open shared object file")
        if mode:
            self.made_global.append(name)
        return type("Library", (), dict.fromkeys(self.libraries[name]))()


@pytest.fixture
def linux_without_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(_blas, "_cuda_build", lambda: False)
    monkeypatch.setenv(_blas.ENV, "auto")


@pytest.mark.usefixtures("linux_without_mlx")
class TestChoice:
    @staticmethod
    def load(monkeypatch: pytest.MonkeyPatch, libraries: dict[str, set[str]]) -> tuple[_blas.BlasStatus, list[str]]:
        resolver = Resolver(libraries)
        monkeypatch.setattr("ctypes.CDLL", resolver)
        return _blas.preload(), resolver.made_global

    def test_openblas_is_preferred_to_mkl(self, monkeypatch: pytest.MonkeyPatch) -> None:
        both = {"libopenblas.so.0": {"cblas_sgemm"}, "libmkl_rt.so.2": {"cblas_sgemm"}}
        status, made_global = self.load(monkeypatch, both)
        assert status == _blas.BlasStatus("loaded", library="libopenblas.so.0")
        assert made_global == ["libopenblas.so.0"]

    def test_the_wheels_library_is_the_last_that_is_tried(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        package = tmp_path / "scipy_openblas32"
        package.mkdir()
        (package / "__init__.py").write_text("raise AssertionError('imported')")
        monkeypatch.syspath_prepend(str(tmp_path))
        wheels = {str(package / "lib" / "libopenblas_python.so"): {"cblas_sgemm"}}
        assert self.load(monkeypatch, wheels)[1] == list(wheels)
        assert self.load(monkeypatch, {**wheels, "libopenblas.so.0": {"cblas_sgemm"}})[1] == ["libopenblas.so.0"]

    def test_a_cuda_build_needs_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_blas, "_cuda_build", lambda: True)
        assert self.load(monkeypatch, {})[0].state == "not-needed"

    def test_macos_needs_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        assert self.load(monkeypatch, {})[0].state == "not-needed"
