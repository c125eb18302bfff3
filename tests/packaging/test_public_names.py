"""The library's door: `__all__` is what it imports, and the exception tree is the one that is drawn."""

from __future__ import annotations

import re
import types

import mlx_specprefill
from mlx_specprefill import errors


def test_all_is_every_public_name() -> None:
    public = {
        name
        for name, value in vars(mlx_specprefill).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    helpers = {"preload"}  # its result, BLAS, is public
    assert set(mlx_specprefill.__all__) == (public - helpers) | {"__version__"}


def test_every_error_is_public() -> None:
    assert set(errors.__all__) <= set(mlx_specprefill.__all__)


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
    classes = {name: getattr(errors, name) for name in errors.__all__}
    real = {
        name: next((base.__name__ for base in cls.__mro__[1:] if base.__name__ in classes), None)
        for name, cls in classes.items()
    }
    assert drawn_tree() == real
