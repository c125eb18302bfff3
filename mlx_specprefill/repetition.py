"""DRY ("don't repeat yourself"): a penalty on the tokens that would lengthen a repetition.

As llama.cpp does it: prompt and answer are searched for the longest earlier copy of what stands at the end. The token
behind that copy loses multiplier * base ** (length of the copy - allowed length).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from .request import SamplingParams, TokenIds

# A copy counts at most so many tokens beyond the allowed length, which bounds the work where a text only repeats.
# For bases above 1.09 llama.cpp's own limit is lower.
_LONGEST_COPY = 1024
LONGEST_ALLOWED = 1024
_LARGEST_POWER = 88.7228391  # logarithm of the largest float32; no power of the base is above it
_LARGEST_PENALTY = 1e30  # leaves a finite logit


def without_repeats(params: SamplingParams, prompt: TokenIds) -> Callable[[mx.array, mx.array], mx.array]:
    """Return a function of (generated tokens so far, logits (1, V)) that applies the penalty."""
    last_n = params.dry_penalty_last_n
    breakers = _Breakers(params.dry_sequence_breakers)

    def process(history: mx.array, logits: mx.array) -> mx.array:
        text = np.concatenate([prompt, np.array(history, dtype=np.int32)])
        penalties = _penalties(text if last_n < 0 else text[max(text.size - last_n, 0) :], params, breakers)
        if penalties:
            ids, lost = (mx.array(list(part)) for part in (penalties.keys(), penalties.values()))
            logits[:, ids] -= lost.astype(logits.dtype)
        return logits

    return process


class _Breakers:
    """Token sequences that no repetition crosses, by their first token."""

    def __init__(self, sequences: tuple[tuple[int, ...], ...]) -> None:
        self._tails: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for head, *tail in sequences:
            self._tails[head].append(tuple(tail))
        self._heads = np.array(sorted(self._tails), dtype=np.int32)

    def breaks(self, token: int) -> bool:
        """Return whether the token alone is one."""
        return () in self._tails.get(token, ())

    def distance(self, text: TokenIds) -> int:
        """Return the number of tokens behind the last one in the text; all if there is none."""
        for start in np.flatnonzero(np.isin(text, self._heads))[::-1].tolist():
            behind = text[start + 1 :].tolist()
            sizes = [len(tail) for tail in self._tails[int(text[start])] if tuple(behind[: len(tail)]) == tail]
            if sizes:
                return len(behind) - max(sizes)
        return text.size


def _penalties(text: TokenIds, params: SamplingParams, breakers: _Breakers) -> dict[int, float]:
    """Return what each token that would lengthen a repetition loses."""
    allowed = params.dry_allowed_length
    if text.size <= allowed:
        return {}
    limit = breakers.distance(text)
    if limit < allowed:
        return {}
    longest = dict[int, int]()
    copies = _copy_lengths(text, min(limit, allowed + _LONGEST_COPY))
    for end in np.flatnonzero(copies >= allowed).tolist():
        token = int(text[end + 1])
        longest[token] = max(longest.get(token, 0), int(copies[end]))
    power = math.log(max(params.dry_base, 1.000001))
    most = int(_LARGEST_POWER / power)
    return {
        token: min(params.dry_multiplier * params.dry_base ** min(length - allowed, most), _LARGEST_PENALTY)
        for token, length in longest.items()
        if not breakers.breaks(token)
    }


def _copy_lengths(text: TokenIds, limit: int) -> TokenIds:
    """Return for each place but the last how many tokens up to it, at most `limit`, are those at the text's end."""
    lengths = np.zeros(text.size - 1, dtype=np.int32)
    ends = np.arange(text.size - 1)
    for length in range(limit):
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == text[-1 - length]]
        if not ends.size:
            break
        lengths[ends] = length + 1
    return lengths
