"""The types of arrays on the host, which several parts exchange. Token ids have their own, in `request`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int32]  # of a prompt's tokens
Positions = npt.NDArray[np.int32]  # by which RoPE rotates
Spans = npt.NDArray[np.int64]  # of tokens: their characters [start, end), or of lines: their tokens; ascending, (N, 2)
Floats = npt.NDArray[np.float32]
NO_INDICES: Indices = np.zeros(0, dtype=np.int32)
NO_SPANS: Spans = np.zeros((0, 2), dtype=np.int64)
