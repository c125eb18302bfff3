"""Finds the lines of a prompt that ask, whose attention says which tokens matter: mostly the last line or sentence.

Behind tool results this question stands further up. People and agents also write what they want in front of a text, in
the system message, a turn before, or in front of rules for the answer. Which lines do, the draft's own values say
(`heads.LineProbe`). These are fed once more behind the prompt, from where they see all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import NO_SPANS, Bools, Floats, Indices, Spans
from ..config import ScoringConfig
from ..request import PromptSpan
from .selector import PIECE, pieces

_USERS = 2  # newest user messages that may ask
_ROWS, _MOST_ROWS = 64, 256  # tokens of other lines that are asked, which one forward reads, at least and at most
_PART = 12  # of a prompt, between the two
_SURE, _SURE_WEIGHT = 3, 3.0  # best lines, among which the one that asks mostly is, and their weight
_BESIDE = 0.5  # of the better neighbour's score, which a further line gets: a request may have several lines


def question_span(
    prompt_len: int, config: ScoringConfig, end: int | None = None, units: Indices | None = None
) -> tuple[int, int]:
    """Return [start, end) of the question's tokens, at least one.

    Args:
        end: of the last message; the prompt's if not given.
        units: starts of lines and sentences. The last one before `end` is the question, within the limits of
            `ScoringConfig.question_rows`. Without units the lower limit gives the number of tokens.
    """
    least, most = config.question_rows
    end = prompt_len if end is None else max(1, min(end, prompt_len))
    rows = least
    if units is not None and (before := units[units < end]).size:
        rows = min(max(end - int(before[-1]), least), most)
    return max(0, end - rows), end


def repeated_question_spans(spans: Sequence[PromptSpan], config: ScoringConfig, units: Indices) -> Spans:
    """Return the ranges [start, end) of the question in a prompt that ends with tool results, in reading order, (N, 2).

    These are the model's last call with the text before it, and the last line or sentence of the last user message,
    each with header and end marker. Empty if the prompt ends with another kind of message: that one is the question.
    """
    users = [span for span in spans if span.kind == "user"]
    if not users or spans[-1].kind != "tool":
        return NO_SPANS
    user, places = users[-1], list[tuple[int, int]]()
    for called in [span for span in spans if span.kind == "assistant" and span.start > user.start][-1:]:
        said = max(called.content_start, called.content_end - config.question_rows[1])
        places += [(called.start, called.content_start), (said, called.end)]
    question = max(user.content_start, question_span(user.content_end, config, units=units)[0])
    places += [(user.start, user.content_start), (question, user.end)]
    return np.array([(start, end) for start, end in places if start < end], dtype=np.int64)


def lines_of(spans: Sequence[PromptSpan], prompt_len: int, units: Indices) -> Spans:
    """Return [start, end) of the lines that people may ask in, in reading order, (N, 2); of long ones, their pieces.

    They are those of the two newest user messages, and of system messages in front of all turns: what a later system
    message says is an agent's reminder.

    Args:
        spans: of the prompt's messages; none for a raw completion, which is treated as one user message.
        units: starts of lines and sentences.
    """
    spans = spans or [PromptSpan("user", 0, 0, prompt_len, prompt_len)]
    users = [span for span in spans if span.kind == "user"]
    systems = [span for span in spans if span.kind == "system" and users and span.start < users[0].start]
    found = [NO_SPANS]
    for span in (*systems, *users[-_USERS:]):
        inside = units[(units > span.content_start) & (units < span.content_end)]
        found.append(np.stack(pieces(np.append(span.content_start, inside), span.content_end, PIECE), axis=1))
    lines = np.concatenate(found)
    return lines[lines[:, 0] < lines[:, 1]]


def rows_of(prompt_len: int) -> int:
    """Return how many tokens of a prompt's other lines may be asked."""
    return min(max(_ROWS, prompt_len // _PART), _MOST_ROWS) + PIECE  # for the newest message's first line


def asked_lines(scores: Floats | None, lines: Spans, question: Spans, rows: int) -> Floats:
    """Return the weights (N,) with which lines ask beside the question: 3 of the best three, 1 of the newest message's
    first and of further ones, for which a neighbour that asks counts, 0 of all where the question leads.

    Args:
        scores: (N,), how much each line asks; None: nothing is known but their places.
        lines: [start, end) of each, (N, 2).
        question: [start, end) of tokens that are asked anyway, (Q, 2).
        rows: tokens of these lines.
    """
    beside = np.all((lines[:, :1] >= question[:, 1]) | (lines[:, 1:] <= question[:, 0]), axis=1)
    weights, sure = np.zeros(len(lines), dtype=np.float32), 0 if scores is None else _SURE
    begins = np.append(True, lines[1:, 0] > lines[:-1, 1])[: len(lines)]  # of messages
    if scores is None:
        scores, rows = _by_place(lines, begins), min(rows, _ROWS)
        further = scores
    elif scores[~beside].max(initial=-np.inf) >= scores[beside].max(initial=-np.inf):
        return weights
    else:
        further = scores + _BESIDE * _of_better_neighbours(scores, begins)
    best, first = np.argsort(-scores, kind="stable").tolist()[:sure], np.flatnonzero(begins)[-1:].tolist()
    for rank, line in enumerate(dict.fromkeys([*best, *first, *np.argsort(-further, kind="stable").tolist()])):
        if beside[line] and (size := int(np.diff(lines[line])[0])) <= rows:
            rows, weights[line] = rows - size, _SURE_WEIGHT if rank < sure else 1
    return weights


def _of_better_neighbours(scores: Floats, begins: Bools) -> Floats:
    """Return the better score of the two lines beside each one in its message, (N,); without any, the lowest of all."""
    before = np.where(begins, scores.min(), np.roll(scores, 1))
    behind = np.where(np.roll(begins, -1), scores.min(), np.roll(scores, -1))
    return np.asarray(np.maximum(before, behind))


def _by_place(lines: Spans, begins: Bools) -> Floats:
    """Return scores of lines by their places alone, (N,): those at both ends of messages first, the newest before."""
    message, begin, end = np.cumsum(begins) - 1, lines[begins, 0], lines[np.roll(begins, -1), 1]
    inside = np.minimum(lines[:, 0] - begin[message], end[message] - lines[:, 1])
    return np.asarray(np.arange(len(lines)) / max(len(lines), 1) - inside, dtype=np.float32)
