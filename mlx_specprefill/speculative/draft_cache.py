"""What the caches that proposers draft on have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache, create_attention_mask

__all__ = ["DraftKVCache"]


class DraftKVCache(_BaseCache):  # type: ignore[misc]
    """Keys and values (1, H, S, D) of a part of a text, in mlx-lm's cache protocol.

    What is drafted is appended and can be trimmed. Stored keys keep their rotation.
    """

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def state(self) -> Sequence[mx.array | None]:
        return self.keys, self.values

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[2])

    def empty(self) -> bool:
        return self.keys is None

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return create_attention_mask(N, self.size(), return_array, window_size)

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else int(self.keys.nbytes + self.values.nbytes)
