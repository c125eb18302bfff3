"""Proposals without a model: what followed the last time the text went like this (prompt lookup).

The last tokens of the text are looked for in the prompt and in the answer so far, the longest match first, and what
followed there is proposed. That is often right where an answer repeats its prompt: an edited file, a quote, a tool call
with names from the context. After a sparse prefill the whole prompt is searched, also what the target has not seen;
the target verifies every token all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..config import SpeculationConfig
from ..request import TokenIds
from .proposers import Proposal, Proposer, Verified
from .token_sampler import TokenSampler

__all__ = ["NgramProposer", "continuation_of"]

_LONGEST = 32  # tokens of a match that are compared; longer ones are as good
_FIRST = 2  # tokens that are proposed before anything is known of the answer


class NgramProposer(Proposer):
    """Proposes as many tokens as the last proposals make likely: twice as many after one that was accepted as a whole,
    as many as were accepted after any other. After one of which nothing was accepted, a match has to be twice as long
    as before; after the next that is right, as long as at first. So an answer that goes its own way costs little.

    Args:
        prompt: its token ids.
        config: `ngram` and `ngram_match` count.
    """

    def __init__(self, prompt: TokenIds, config: SpeculationConfig) -> None:
        self.gamma = config.ngram
        self._text = np.asarray(prompt, dtype=np.int32)
        self._size = self._text.size  # of the part in use: the prompt and the tokens of the answer
        self._prompt_size = self._size
        self._shortest = self._least = config.ngram_match
        self._trusted = _FIRST

    def idle(self, text: Sequence[int]) -> bool:
        """Where nothing like the last tokens is found. A match that the next token begins is found one token later."""
        self._follow(text)
        return continuation_of(self._text[: self._size], self._least, 1).size == 0

    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Proposal:
        """Takes no forward."""
        self._follow(text)
        found = continuation_of(self._text[: self._size], self._least, min(count, self._trusted))
        tokens: list[int] = found[: sampler.permitted(text, found.tolist())].tolist()
        return Proposal(tokens, list(tokens))

    def settle(self, verified: Verified) -> None:
        if verified.proposed:
            whole = verified.accepted == verified.proposed
            self._trusted = max(1, 2 * verified.accepted if whole else verified.accepted)
            self._least = self._shortest if verified.accepted else min(2 * self._least, _LONGEST)

    def _follow(self, text: Sequence[int]) -> None:
        """Take in what is new of the answer."""
        size = self._prompt_size + len(text)
        if size > self._text.size:
            self._text = np.concatenate([self._text, np.zeros(max(256, self._text.size // 4, len(text)), np.int32)])
        self._text[self._size : size] = text[self._size - self._prompt_size :]
        self._size = size


def continuation_of(text: npt.NDArray[np.int32], least: int, count: int) -> npt.NDArray[np.int32]:
    """What followed the last tokens of `text` at the best earlier place: up to `count` ids, none without a match.

    The best place is the one whose preceding tokens are those at the end of `text` for longest, the latest of several.

    Args:
        text: (T,) ids.
        least: tokens that have to be the same.
    """
    size = text.size
    places = np.flatnonzero(text[:-1] == text[-1:])  # of the last token, earlier on
    length = min(1, places.size)
    while places.size and length < min(_LONGEST, size - 1):
        longer = places[(places >= length) & (text[places - length] == text[size - 1 - length])]
        if not longer.size:
            break
        places, length = longer, length + 1
    if not places.size or length < least:
        return text[:0]
    start = int(places[-1]) + 1
    return text[start : start + count]
