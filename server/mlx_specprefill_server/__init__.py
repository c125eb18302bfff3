"""The HTTP server and the command line over `mlx_specprefill`, and pairs by name for Python programs."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .local import Answer, LocalPair, open_pair

__version__ = metadata.version("mlx-specprefill")

__all__ = ["Answer", "LocalPair", "__version__", "open_pair"]


def __getattr__(name: str) -> Any:
    """Import a public name on use, so that the command line starts without models' libraries."""
    if name in __all__:
        return getattr(import_module(".local", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
