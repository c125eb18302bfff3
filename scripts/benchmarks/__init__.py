"""Benchmarks that `scripts/bench` runs. Every module of this folder is one; `harness` holds their shared code."""

import mlx_specprefill  # noqa: F401  (it loads a fast BLAS, which has no effect once mlx.core is imported)
