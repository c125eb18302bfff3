"""Arrays find in any text what plain loops over its lines found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from mlx_specprefill.selection.selector import _raise_headings
from mlx_specprefill.selection.text import PromptText
from mlx_specprefill.selection.words import word_factors
from tests.selection.test_words import read
from tests.support.precision import assert_close

PIECES = (
    "\n|\n\n|\n\t|a| a|  | b|ab|Ab1|List| all|?|<|tag|>|:|    ```|.| please|Question|Σ|σας|İ|ß|é|。|名前|\u2028|\r|_|-"
)
SOME = st.lists(st.sampled_from(PIECES.split("|")), min_size=1, max_size=60)
TEXTS = st.one_of(
    st.lists(SOME, min_size=1, max_size=8).map(lambda parts: [piece for part in parts for piece in part]),
    SOME.map(lambda line: [*line * 9, "\n", *line]),
    SOME.map(lambda line: [piece for one in line for piece in ("<", one, "\n")]),
    st.integers(1, 400).map(lambda length: ["<", *[" ab"] * length]),  # one line
    st.integers(1, 400).map(lambda length: ["\n"] * length),
)


def factors_by_loops(text: PromptText, asking: Sequence[tuple[int, int]]) -> np.ndarray:
    def words(first: int, last: int) -> set[str]:
        return set(re.findall(r"\w\w+", "".join(text.pieces[first:last]).lower()))

    ends = [*text.units[1:].tolist(), len(text.pieces)]
    units = [*zip(text.units.tolist(), ends, strict=True)]
    wanted = set().union(*(words(*place) for place in asking))
    others = [unit for unit in units if not any(start < unit[1] and unit[0] < end for start, end in asking)]
    lines = {unit: wanted & words(*unit) for unit in others}
    counts = Counter(word for line in lines.values() for word in line)
    rarity = {word: 1 - np.log(count) / np.log(max(len(lines), 2)) for word, count in counts.items()}
    gains = [min(sum(rarity[word] for word in lines.get(unit, ())) / 2, 1) for unit in units]
    return np.repeat(1 + 0.5 * np.array(gains), np.diff([0, *ends]))


@given(TEXTS, st.lists(st.tuples(st.integers(0, 400), st.integers(1, 20)), min_size=1, max_size=4))
@example(["ab", "\n", "σας", "\n", "ΣΑΣ", "\n", "ΣΑΣ"], [(6, 1)])
def test_words(pieces: list[str], places: list[tuple[int, int]]) -> None:
    asking = [(at % len(pieces), min(at % len(pieces) + size, len(pieces))) for at, size in places]
    text = read(pieces)
    assert_close(word_factors(text, asking), factors_by_loops(text, asking), atol=1e-6)


@given(st.data(), st.integers(1, 8), st.integers(1, 300))
def test_headings(data: st.DataObject, size: int, length: int) -> None:
    numbers = st.sets(st.integers(0, length), max_size=60).map(sorted)
    cuts, scores = data.draw(numbers), data.draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))
    headings = [
        (start, end, data.draw(st.integers(end + 1, length)))
        for start, end in pairwise(cuts)
        if end < length and end - start <= 32
    ]
    found = np.array(scores[: -(-length // size)], dtype=np.float32) / 3
    wanted = found.copy()
    for start, end, last in headings:
        heading, below = wanted[start // size : -(-end // size)], wanted[end // size : -(-last // size)]
        np.maximum(heading, below.max(), out=heading)
    _raise_headings(found, np.array(headings, dtype=np.int32).reshape(-1, 3), size)
    assert (found == wanted).all()
