"""Gives MLX on Linux a fast BLAS.

MLX's Linux CPU wheel links the reference BLAS. The dynamic linker looks a symbol up in the global scope first, so an
OpenBLAS or MKL loaded with RTLD_GLOBAL before `mlx.core` replaces it. Nothing is loaded on other systems, with a CUDA
build, or if `MLX_SPECPREFILL_BLAS` is `off`; the same variable can name a library file.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

ENV = "MLX_SPECPREFILL_BLAS"
BlasState = Literal["loaded", "not-needed", "off", "missing", "too-late", "failed"]

# Names as Debian, Fedora and conda install them, the threaded builds first. MKL also comes in the wheel `mkl`.
SONAMES = ("libopenblasp.so.0", "libopenblaso.so.0", "libopenblas.so.0", "libmkl_rt.so.3", "libmkl_rt.so.2")
# The smallest wheel with an OpenBLAS, and the last of its series whose functions have their plain names.
WHEEL = "scipy-openblas32==0.3.23.293.2"
WHEEL_MODULE, WHEEL_LIBRARY = "scipy_openblas32", "lib/libopenblas_python.so"
PROBE = "cblas_sgemm"
FOREIGN_MARKS = ("openblas_get_config", "MKL_Get_Version_String")
ADVICE = (
    "MLX runs on its reference BLAS. Install OpenBLAS (Debian, Ubuntu: apt install libopenblas0-pthread; Fedora: "
    f"dnf install openblas-threads; anywhere: pip install {WHEEL}) and float32 models prefill many times faster. "
    f"{ENV}=off hides this message."
)


@dataclass(frozen=True, slots=True)
class BlasStatus:
    """Result of `preload`. `notice` is a line to show to the user at start, or None."""

    state: BlasState
    library: str | None = None
    notice: str | None = None


def preload() -> BlasStatus:
    """Load OpenBLAS or MKL globally, if this process can gain from it. Never raises, prints nothing."""
    choice = os.environ.get(ENV, "auto").strip() or "auto"
    if not sys.platform.startswith("linux") or _cuda_build():
        return BlasStatus("not-needed")
    if choice == "off":
        return BlasStatus("off")
    if _already_global():
        return BlasStatus("loaded", library="loaded by the environment")
    if "mlx.core" in sys.modules:
        return BlasStatus(
            "too-late",
            notice="mlx was imported before mlx_specprefill, so no fast BLAS was loaded: import mlx_specprefill first.",
        )
    return _load_first() if choice == "auto" else _load_named(choice)


def _cuda_build() -> bool:
    """Return whether matrix products run on an NVIDIA GPU. With `mlx-cpu` installed too, either may own the shared
    file.
    """
    # Reading the names of all distributions would take longer than all else here.
    folders = [Path(folder) for folder in sys.path]
    has_cuda, has_cpu = (
        any(any(folder.glob(name)) for folder in folders) for name in ("mlx_cuda*.dist-info", "mlx_cpu-*.dist-info")
    )
    return has_cuda and not has_cpu


def _already_global() -> bool:
    """Return whether LD_PRELOAD or the program has put a fast BLAS into the global scope."""
    program = ctypes.CDLL(None)
    return hasattr(program, PROBE) and any(hasattr(program, mark) for mark in FOREIGN_MARKS)


def _candidates() -> Iterator[str]:
    """Yield the environment's libraries (conda, the wheel mkl), the system linker's, the wheel's."""
    for soname in SONAMES:
        local = Path(sys.prefix, "lib", soname)
        if local.is_file():
            yield str(local)
    yield from SONAMES
    module = find_spec(WHEEL_MODULE)  # imports nothing
    for folder in (module and module.submodule_search_locations) or ():
        yield str(Path(folder, WHEEL_LIBRARY))


def _load_first() -> BlasStatus:
    for name in _candidates():
        if _load(name) is None:
            return BlasStatus("loaded", library=name)
    return BlasStatus("missing", notice=ADVICE)


def _load_named(name: str) -> BlasStatus:
    error = _load(name)
    if error is None:
        return BlasStatus("loaded", library=name)
    return BlasStatus("failed", notice=f"{ENV}={name}: {error}")


def _load(name: str) -> str | None:
    """Load one library for the whole process; return the reason if that is impossible."""
    try:
        if not hasattr(ctypes.CDLL(name), PROBE):
            return f"{PROBE} is not in it"
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error)
    return None
