"""The library's door: `__all__` is what it imports, and the exception tree is the one that is drawn."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import mlx_specprefill
from mlx_specprefill import errors

PUBLIC: list[str] = vars(mlx_specprefill)["__all__"]


def test_every_public_name_is_what_type_checkers_see() -> None:
    stub = ast.parse(Path(mlx_specprefill.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    places = {name.asname: line.module for line in stub.body if isinstance(line, ast.ImportFrom) for name in line.names}
    for name, module in places.items():
        assert getattr(mlx_specprefill, name) is getattr(import_module(f"mlx_specprefill.{module}"), name), name
    declared = {line.target.id for line in stub.body if isinstance(line, ast.AnnAssign)}
    assert set(PUBLIC) == set(places) | declared
    assert dir(mlx_specprefill) == sorted(PUBLIC)


def test_the_import_loads_no_library_of_models() -> None:
    code = "import sys, mlx_specprefill; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"mlx.core", "mlx_lm", "transformers", "huggingface_hub", "numpy"} & set(modules)


def test_every_error_is_public() -> None:
    assert set(all_errors()) <= set(PUBLIC)


def all_errors() -> dict[str, type]:
    root = errors.SpecPrefillError
    return {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, root)}


def drawn_tree() -> dict[str, str | None]:
    """Class -> parent, as the module's docstring draws it."""
    parents: dict[str, str | None] = {}
    stack: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([│├└─ ]*)([A-Z]\w+(?:Error|Cancelled))\b", line)
        if match is None:
            continue
        depth = len(match[1])
        while stack and stack[-1][0] >= depth:
            stack.pop()
        parents[match[2]] = stack[-1][1] if stack else None
        stack.append((depth, match[2]))
    return parents


def test_the_drawn_exception_tree_is_the_real_one() -> None:
    classes = all_errors()
    real = {
        name: next((base.__name__ for base in cls.__mro__[1:] if base.__name__ in classes), None)
        for name, cls in classes.items()
    }
    assert drawn_tree() == real
