"""Token ids: one int32 array from the tokenizer to the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .errors import InvalidRequestError

__all__ = ["TokenIds", "as_token_ids", "joined"]

TokenIds = npt.NDArray[np.int32]


def as_token_ids(ids: Sequence[int] | TokenIds) -> TokenIds:
    """Token ids as one int32 array (M,) that can't be written to; an int32 array is not copied.

    Raises:
        InvalidRequestError: an id that no vocabulary has.
    """
    try:
        tokens = np.asarray(ids, dtype=np.int32)
    except OverflowError:
        raise InvalidRequestError("the prompt has token ids outside the vocabulary", field="prompt") from None
    if tokens.flags.writeable:
        tokens = tokens.view()
        tokens.flags.writeable = False
    return tokens


def joined(prompt: TokenIds, answer: Sequence[int]) -> TokenIds:
    """The prompt's token ids and those of its answer."""
    return np.concatenate([prompt, np.asarray(answer, dtype=np.int32)])
