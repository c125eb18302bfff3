"""BM25 (Robertson and Zaragoza 2009) over bags of countable terms. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

K, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case. The connecting characters of an identifier belong to its word."""
    return _WORD.findall(text.lower())


class Index:
    """Args:
    documents: the terms of each.
    """

    def __init__(self, documents: Iterable[Sequence[Hashable]]) -> None:
        self._bags = [Counter(document) for document in documents]
        self._sizes = np.array([bag.total() for bag in self._bags], dtype=np.float64)
        self._holding: dict[Hashable, list[int]] = {}
        for number, bag in enumerate(self._bags):
            for term in bag:
                self._holding.setdefault(term, []).append(number)

    def frequency(self, term: Hashable) -> int:
        """Return the number of documents with a term."""
        return len(self._holding.get(term, ()))

    def scores(self, query: Iterable[Hashable]) -> npt.NDArray[np.float32]:
        """Return one score per document. Each term of the query counts once."""
        scores = np.zeros(len(self._bags))
        scale = K * (1 - B + B * self._sizes / max(self._sizes.mean(), 1e-9))
        for term in sorted(set(query) & self._holding.keys(), key=repr):
            holding = self._holding[term]
            rarity = np.log(1 + (len(self._bags) - len(holding) + 0.5) / (len(holding) + 0.5))
            times = np.array([self._bags[number][term] for number in holding])
            scores[holding] += rarity * times * (K + 1) / (times + scale[holding])
        return scores.astype(np.float32)
