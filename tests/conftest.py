"""The package comes first: it loads a fast BLAS, which has no effect once `mlx.core` is imported."""

import mlx_specprefill  # noqa: F401
