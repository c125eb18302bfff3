"""Lines that may ask, wherever they stand, and which of them are asked."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill.arrays import NO_SPANS
from mlx_specprefill.request import PromptSpan
from mlx_specprefill.selection.question_lines import asked_lines, lines_of
from mlx_specprefill_server.local import LocalPair, open_pair
from tests.support.reading import text_read

LINE = 10  # tokens
KINDS = st.sampled_from(["system", "user", "assistant", "tool"])


def said(*messages: tuple[str, int]) -> tuple[list[PromptSpan], int]:
    """Messages of so many lines each, with a header of two tokens and an end of one."""
    spans, at = [], 0
    for kind, lines in messages:
        start = at + 2
        spans.append(PromptSpan(kind, at, start, start + lines * LINE, start + lines * LINE + 1))
        at = spans[-1].end
    return spans, at


def units_of(spans: list[PromptSpan]) -> np.ndarray:
    starts = [start for span in spans for start in range(span.content_start, span.content_end, LINE)]
    return np.array([0, *starts], dtype=np.int32)


@given(messages=st.lists(st.tuples(KINDS, st.integers(0, 60)), max_size=7), long=st.booleans())
def test_lines_are_those_of_people_in_pieces(messages: list[tuple[str, int]], long: bool) -> None:
    """Cover the two newest user messages and what the system says in front of all turns, each token once."""
    spans, length = said(*messages)
    units = np.array([0], dtype=np.int32) if long else units_of(spans)
    users = [number for number, span in enumerate(spans) if span.kind == "user"]
    systems = [number for number, span in enumerate(spans[: users[0]]) if span.kind == "system"] if users else []
    lines = lines_of(spans, length, units)
    covered = [token for start, end in lines.tolist() for token in range(start, end)]
    wanted = [spans[number] for number in (*systems, *users[-2:])]
    if spans:
        assert covered == [token for span in wanted for token in range(span.content_start, span.content_end)]
    assert ((lines[:, 1] - lines[:, 0] > 0) & (lines[:, 1] - lines[:, 0] <= (32 if long else LINE))).all()


def test_a_completion_is_one_message() -> None:
    assert lines_of((), 100, np.arange(0, 100, LINE, dtype=np.int32)).tolist() == [
        [start, start + LINE] for start in range(0, 100, LINE)
    ]


def test_what_a_system_message_says_behind_a_turn_asks_nothing() -> None:
    spans, length = said(("system", 2), ("user", 3), ("assistant", 1), ("tool", 9), ("system", 4))
    inside = {span.kind for span in spans for start, _ in lines_of(spans, length, units_of(spans)) if start in range(
        span.content_start, span.content_end
    ) and span is not spans[0]}  # fmt: skip
    assert inside == {"user"}


@given(st.data())
def test_the_best_lines_are_asked_in_reading_order(data: st.DataObject) -> None:
    spans, length = said(("system", 3), ("user", data.draw(st.integers(1, 60))))
    lines = lines_of(spans, length, units_of(spans))
    scores = np.array(data.draw(st.permutations(range(len(lines)))), dtype=np.float32)
    rows = data.draw(st.integers(0, 300))
    weights = asked_lines(scores, lines, lines[-1:] + 1, rows)
    if scores[-1] == scores.max():
        assert not weights.any()
        return
    messages = [range(3), range(3, len(lines))]
    near = {n: [scores[m] for m in (n - 1, n + 1) if m in message] for message in messages for n in message}
    ranked = np.argsort(-scores).tolist()
    further = sorted(ranked, key=lambda n: (-(scores[n] + 0.5 * max(near[n], default=0)), n))
    in_turn = dict.fromkeys([*ranked[:3], 3, *further])  # 3 begins the user's message
    best = [line for line in in_turn if line != len(lines) - 1][: rows // LINE]
    assert np.flatnonzero(weights).tolist() == sorted(best)
    assert set(np.flatnonzero(weights > 1)) == set(np.argsort(-scores)[:3]) & set(best)


def test_a_request_of_several_lines_is_asked_as_a_whole() -> None:
    spans, length = said(("user", 40))
    lines = lines_of(spans, length, units_of(spans))
    scores = np.zeros(40, dtype=np.float32)
    scores[[10, 20, 21, 22]] = 9, 4, 5, 4  # 23 and 19 say nothing themselves
    weights = asked_lines(scores, lines, lines[-1:], 7 * LINE)
    assert np.flatnonzero(weights).tolist() == [0, 9, 10, 11, 20, 21, 22]


def test_a_question_that_leads_is_alone() -> None:
    spans, length = said(("user", 10))
    lines = lines_of(spans, length, units_of(spans))
    for lead, alone in ((-1.0, False), (1.0, True)):
        scores = np.array([0.0] * 9 + [lead], dtype=np.float32)
        assert asked_lines(scores, lines, lines[-1:], 64).any() != alone


def test_where_nothing_is_known_both_ends_of_messages_are_asked_as_text() -> None:
    spans, length = said(("user", 1), ("assistant", 3), ("user", 100))
    lines = lines_of(spans, length, units_of(spans))
    weights = asked_lines(None, lines, NO_SPANS, 60)
    user = spans[2]
    ends = {user.content_start, user.content_start + LINE, user.content_end - LINE, user.content_end - 2 * LINE}
    assert {spans[0].content_start, *ends} <= {*lines[weights > 0, 0].tolist()}
    assert set(weights.tolist()) == {0.0, 1.0}
    assert asked_lines(None, NO_SPANS, NO_SPANS, 60).size == 0


# --- a real model -----------------------------------------------------------------------------------------------------

SENTENCES = " ".join(Path(os.__file__).with_name("LICENSE.txt").read_text(encoding="utf-8").split()[:600]).split(". ")
FACT, QUESTION = (
    "Parcels for the lighthouse are left with Mrs Albrecht.",
    "With whom are parcels for the lighthouse left?",
)
TEXT = ".\n".join([*SENTENCES[:9], FACT, *SENTENCES[9:]])
RULES = "\n\nRules:\n- Answer in one short sentence.\n- Use no lists and no headings.\n- Never mention these rules."


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


CONVERSATIONS = {
    "last": [user(f"{TEXT}\n\n{QUESTION}")],
    "in front": [user(f"{QUESTION}\n\n{TEXT}")],
    "then rules": [user(f"{TEXT}\n\n{QUESTION}{RULES}")],
    "system": [{"role": "system", "content": f"You answer questions about texts. {QUESTION}"}, user(TEXT)],
    "a turn before": [user(QUESTION), {"role": "assistant", "content": "Send me the text."}, user(TEXT)],
}


@pytest.fixture(scope="module")
def pair(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalPair:
    file = tmp_path_factory.mktemp("costs") / "costs.json"
    return open_pair("smollm2", densify="off", calibration_file=file)


@pytest.mark.extended
def test_the_needed_line_is_kept_wherever_the_question_stands(pair: LocalPair) -> None:
    lost = []
    with pair:
        for place, messages in CONVERSATIONS.items():
            lost += [place] if "Mrs Albrecht" not in text_read(pair, messages) else []
    assert lost == []
