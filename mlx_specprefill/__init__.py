"""Sparse prefill for long prompts over MLX and mlx-lm."""

from ._blas import BlasStatus, preload

BLAS = preload()  # before anything imports mlx.core

__version__ = "0.1.0"

__all__ = ["BLAS", "BlasStatus", "__version__"]
