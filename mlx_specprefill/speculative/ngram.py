"""Proposals without a model: what followed the answer's last tokens earlier in its prompt or text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..request import TokenIds
from .acceptance import TokenSampler
from .proposer import Models, Proposal, Proposer, Verified

_LONGEST = 32  # compared tokens of a match
_FIRST = 2  # proposed tokens before any result is known


class NgramProposer(Proposer):
    """Proposes the continuation of an earlier occurrence of the last tokens, without a model (prompt lookup).

    The last tokens of the text are searched in the prompt and in the answer so far, and the continuation of the longest
    match is proposed. It is often right where an answer repeats its prompt: an edited file, a quote, a tool call with
    names from the context. After a sparse prefill the whole prompt is searched, including dropped tokens; the target
    verifies every token in any case.

    Adapts the number of proposed tokens to the last result: doubled after a proposal that was accepted in full, else
    the number accepted. After a proposal without accepted tokens, a match has to be twice as long; after the next right
    one, the normal length. So an answer that does not repeat its prompt costs little.
    """

    def __init__(self, models: Models, prompt: TokenIds) -> None:
        self.gamma = models.config.ngram
        self._text = np.asarray(prompt, dtype=np.int32)
        self._size = self._text.size  # used part: the prompt and the tokens of the answer
        self._prompt_size = self._size
        self._shortest = self._least = models.config.ngram_match
        self._trusted = _FIRST

    def idle(self, text: Sequence[int]) -> bool:
        """Return True if the last tokens have no match. A match that the next token begins is found one token later."""
        self._follow(text)
        return continuation_of(self._text[: self._size], self._least, 1).size == 0

    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Proposal:
        """Propose without a forward."""
        self._follow(text)
        ids = continuation_of(self._text[: self._size], self._least, min(count, self._trusted))
        tokens: list[int] = ids[: sampler.count_permitted(text, ids.tolist())].tolist()
        return Proposal(tokens, list(tokens))

    def accept(self, verified: Verified) -> None:
        if verified.proposed:
            whole = verified.accepted == verified.proposed
            self._trusted = max(1, 2 * verified.accepted if whole else verified.accepted)
            self._least = self._shortest if verified.accepted else min(2 * self._least, _LONGEST)

    def _follow(self, text: Sequence[int]) -> None:
        """Append the answer's new tokens."""
        size = self._prompt_size + len(text)
        if size > self._text.size:
            self._text = np.concatenate([self._text, np.zeros(max(256, self._text.size // 4, len(text)), np.int32)])
        self._text[self._size : size] = text[self._size - self._prompt_size :]
        self._size = size


def continuation_of(text: TokenIds, least: int, count: int) -> TokenIds:
    """Return the continuation of the best earlier match of the end of `text`: at most `count` ids, or none.

    The best match is the longest one, the latest of several.

    Args:
        text: (T,) ids.
        least: tokens that have to be the same.
    """
    size = text.size
    places = np.flatnonzero(text[:-1] == text[-1:])  # earlier occurrences of the last token
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
