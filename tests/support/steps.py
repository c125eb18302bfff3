"""Work that is cut into steps, run without pauses."""

from __future__ import annotations

from mlx_specprefill.cache.prefix.tree import finish

__all__ = ["finish"]
