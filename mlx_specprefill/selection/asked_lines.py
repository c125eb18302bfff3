"""Finds the lines that ask beside a prompt's question, which is its last one.

People and agents also write what they want in front of a text, in the system message, a turn before, or in front of
rules for the answer. Which lines do, the draft's own states say (`adapters.heads.LineProbe`). These are fed once more
behind the prompt, from where they see all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..arrays import Floats, Indices, Spans
from ..request import PromptSpan

_USERS = 2  # newest user messages that may ask
_ROWS, _MOST_ROWS = 64, 256  # tokens of other lines that are asked, which one forward reads, at least and at most
_PART = 12  # of a prompt, between the two
_PIECE = 32  # most tokens of a line; of a longer one each piece may ask
_BY_PLACE = 64  # most tokens of lines that are asked by their places alone, of which few ask
_SURE, _SURE_WEIGHT = 3, 3.0  # best lines, among which the one that asks mostly is, and their weight


class Ask(NamedTuple):
    """A line that may ask: its number among `lines_of`, prompt indices [start, end), and its weight beside others.

    One of more weight than 1 counts as a question does, and the target reads it. Else it competes by its score as all
    text does.
    """

    line: int
    start: int
    end: int
    weight: float


def lines_of(spans: Sequence[PromptSpan], prompt_len: int, units: Indices) -> Spans:
    """Return [start, end) of the lines that people may ask in, in reading order, (N, 2).

    They are those of the two newest user messages, and of system messages in front of all turns: what a later system
    message says is an agent's reminder.

    Args:
        spans: of the prompt's messages; none for a raw completion, which is treated as one user message.
        units: starts of lines and sentences.
    """
    spans = spans or [PromptSpan("user", 0, 0, prompt_len, prompt_len)]
    users = [span for span in spans if span.kind == "user"]
    systems = [span for span in spans if span.kind == "system" and users and span.start < users[0].start]
    pieces = [piece for span in (*systems, *users[-_USERS:]) for piece in _pieces(span, units)]
    return np.array(pieces, dtype=np.int64).reshape(-1, 2)


def _pieces(span: PromptSpan, units: Indices) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of a message's lines and sentences; of long ones, their pieces."""
    inside = units[(units > span.content_start) & (units < span.content_end)].tolist()
    for first, last in pairwise([span.content_start, *inside, span.content_end]):
        for start in range(first, last, _PIECE):
            yield start, min(start + _PIECE, last)


def sizes_beside(asked: Sequence[tuple[int, int]], lines: Spans) -> Indices:
    """Return the tokens of each line, (N,); 0 for lines in one of the ranges [start, end) that are asked anyway."""
    is_asked = np.any([(lines[:, 1] > start) & (lines[:, 0] < end) for start, end in asked], axis=0)
    return np.where(is_asked, 0, lines[:, 1] - lines[:, 0]).astype(np.int32)


def rows_of(prompt_len: int) -> int:
    """Return how many tokens of a prompt's other lines may be asked."""
    return min(max(_ROWS, prompt_len // _PART), _MOST_ROWS)


def asked_lines(scores: Floats | None, lines: Spans, sizes: Indices, rows: int) -> tuple[Ask, ...]:
    """Return the lines that ask beside the question, in reading order: the best ones, the best three as sure. None
    where the question leads.

    Args:
        scores: (N,), how much each line asks; None: nothing is known but their places.
        lines: [start, end) of each, (N, 2).
        sizes: (N,), of these rows that each one takes; 0: it is the question's, or not to be asked.
    """
    if scores is None:
        scores, sure, rows = _by_place(lines), 0, min(rows, _BY_PLACE)
    else:
        sure = _SURE
        if scores[sizes == 0].max(initial=-np.inf) >= scores[sizes > 0].max(initial=-np.inf):
            return ()
    asks = list[Ask]()
    for rank, line in enumerate(np.argsort(-scores, kind="stable").tolist()):
        if 0 < sizes[line] <= rows:
            rows -= int(sizes[line])
            start, end = lines[line].tolist()
            asks.append(Ask(line, start, end, _SURE_WEIGHT if rank < sure else 1.0))
    return tuple(sorted(asks))


def _by_place(lines: Spans) -> Floats:
    """Return scores of lines by their places alone, (N,): those at both ends of messages first, the newest before."""
    header = lines[1:, 0] > lines[:-1, 1]
    begins, ends = np.append(True, header)[: len(lines)], np.append(header, True)[: len(lines)]
    message = np.cumsum(begins) - 1
    inside = np.minimum(lines[:, 0] - lines[begins, 0][message], lines[ends, 1][message] - lines[:, 1])
    return np.asarray(np.arange(len(lines)) / max(len(lines), 1) - inside, dtype=np.float32)
