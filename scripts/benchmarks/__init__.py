"""What `scripts/bench` runs: every module of this folder is a benchmark, `harness` is what they share."""

import mlx_specprefill  # noqa: F401  (it loads a fast BLAS, which has no effect once mlx.core is imported)
