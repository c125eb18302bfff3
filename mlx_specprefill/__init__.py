"""Sparse prefill for long prompts over MLX and mlx-lm.

Example::

    from mlx_specprefill import Engine, GenerationRequest, load_pair

    with Engine(load_pair("path/to/target", "path/to/draft")) as engine:
        for event in engine.generate(GenerationRequest(prompt=tokens, max_tokens=64)):
            ...

A public name is imported when it is used, because mlx-lm takes seconds to import. `__init__.pyi` lists them.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from ._blas import preload
from ._files import raise_file_limit

# Before anything imports mlx.core or mlx-lm.
BLAS = preload()
raise_file_limit()

__version__ = "0.1.0"

_LISTED = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+)", _LISTED, re.MULTILINE)}
__all__ = sorted([*_MODULES, "BLAS", "__version__"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
