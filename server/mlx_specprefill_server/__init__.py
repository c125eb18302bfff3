"""The HTTP server and the command line over `mlx_specprefill`, and pairs by name for Python programs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_specprefill import __version__

    from .local import Answer, LocalPair, open_pair

__all__ = ["Answer", "LocalPair", "__version__", "open_pair"]


def __getattr__(name: str) -> Any:
    """Import a public name on use, so that the command line starts without models' libraries."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("mlx_specprefill" if name == "__version__" else ".local", __name__), name)
