"""Lines that may be the question of a prompt, wherever they stand."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill.config import ScoringConfig
from mlx_specprefill.request import PromptSpan
from mlx_specprefill.specprefill.question import Ask, possible_questions
from mlx_specprefill.specprefill.text import PromptText
from mlx_specprefill_server.local import LocalPair, open_pair
from tests.specprefill.test_words import read
from tests.support.reading import text_read

CONFIG = ScoringConfig()
LINE = 10  # tokens


def said(*messages: tuple[str, int]) -> tuple[list[PromptSpan], int]:
    """Messages of so many lines each, with a header of two tokens and an end of one."""
    spans, at = [], 0
    for kind, lines in messages:
        start = at + 2
        spans.append(PromptSpan(kind, at, start, start + lines * LINE, start + lines * LINE + 1))
        at = spans[-1].end
    return spans, at


def asked(spans: list[PromptSpan], length: int, *questions: tuple[int, int]) -> tuple[Ask, ...]:
    """Return what may ask, where line b of message a is a question for every (a, b)."""
    starts = [start for span in spans for start in range(span.content_start, span.content_end, LINE)]
    marks = [spans[message].content_start + (line + 1) * LINE - 1 for message, line in questions]
    text = PromptText(np.array([0, *starts], dtype=np.int32), marks=np.array(sorted(marks), dtype=np.int32))
    return possible_questions(spans, length, text, CONFIG)


PLACES = {
    "in front of the document": ([("user", 100)], (0, 0)),
    "in the middle": ([("user", 100)], (0, 50)),
    "in the system message": ([("system", 5), ("user", 100)], (0, 2)),
    "a turn before the document": ([("user", 1), ("assistant", 3), ("user", 100)], (0, 0)),
    "in front of tool results": ([("user", 30), ("assistant", 2), ("tool", 50)], (0, 3)),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_question_is_found_wherever_it_stands(place: str) -> None:
    messages, (message, line) = PLACES[place]
    spans, length = said(*messages)
    start = spans[message].content_start + line * LINE
    found = [ask for ask in asked(spans, length, (message, line)) if ask.start <= start < ask.end]
    assert [(ask.start, ask.end) for ask in found] == [(start, start + LINE)]
    assert found[0].read
    assert found[0].weight > 1


def test_several_question_marks_in_a_document_may_be_its_own() -> None:
    spans, length = said(("user", 100))
    found = {ask.start: (ask.weight > 1, ask.read) for ask in asked(spans, length, (0, 0), (0, 40), (0, 60))}
    first = spans[0].content_start
    assert [found[first + line * LINE] for line in (0, 40, 60)] == [(True, True), (False, True), (False, True)]


def test_the_only_question_in_the_last_line_needs_no_other() -> None:
    spans, length = said(("system", 3), ("user", 100))
    assert asked(spans, length, (1, 99)) == ()
    assert asked(spans, length, (1, 99), (1, 0)) != ()


def test_without_a_question_the_ends_of_messages_may_ask_but_not_the_last_line() -> None:
    spans, length = said(("user", 1), ("assistant", 1), ("user", 100))
    found = {ask.start for ask in asked(spans, length)}
    user = spans[2]
    assert {spans[0].content_start, user.content_start, user.content_start + LINE, user.content_end - 2 * LINE} <= found
    assert user.content_end - LINE not in found
    assert user.content_start + 50 * LINE not in found


def test_a_completion_is_one_message() -> None:
    text = PromptText(np.arange(0, 1000, LINE, dtype=np.int32), marks=np.array([9], dtype=np.int32))
    assert Ask(0, LINE, 3.0, True) in possible_questions([], 1000, text, CONFIG)


@given(
    messages=st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.integers(0, 60)), max_size=6
    ),
    questions=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 59)), max_size=40),
)
def test_what_may_ask_is_bounded_and_belongs_to_people(
    messages: list[tuple[str, int]], questions: set[tuple[int, int]]
) -> None:
    spans, length = said(*messages)
    there = [(a, b) for a, b in questions if a < len(messages) and b < messages[a][1]]
    found = asked(spans, length, *there) if spans else ()
    people = [span for span in spans if span.kind in ("user", "system")]
    assert sum(ask.end - ask.start for ask in found) <= min(256, max(64, length // 12))
    assert list(found) == sorted(found)
    assert all(one.end <= other.start for one, other in pairwise(found))
    assert all(any(s.content_start <= ask.start and ask.end <= s.content_end for s in people) for ask in found)


# --- orders, by their text -------------------------------------------------------------------------------------------

ORDER = "List all ports that the harbour office closes in winter."
LONG = " ".join(f"ships of class {number} sail to the port of their owner" for number in range(12))
DOCUMENT = "\n\n".join([LONG, LONG.replace("sail", "return"), LONG.replace("ships", "boats")])
RULE = "- Keep it short.\n- Use no lists and no headings.\n- Say so where the text says nothing."
AROUND = {
    "in front": "{order}\n\n{document}",
    "in front of a tag": '{order}\n<file name="a.txt">\n{document}\n</file>',
    "between": "{document}\n\n{order}\n\n{document}",
    "before rules": f"{{document}}\n\n{{order}}\n\nRules for the answer:\n{RULE}\n{RULE}\n{RULE}\n{RULE}",
    "before a signature": "{document}\n\n{order}\n\nKind regards,\nJ. Doe\nHarbour Office\n4 Quay Street",
}
# How a tokenizer may cut line breaks: one by one, blank lines in one, or with the stop in front of them.
BREAKS = (r" ?\w+|\W", r"\n+| ?\w+|\W", r"[.!]?\n+| ?\w+|\W")


@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.parametrize("around", AROUND)
def test_an_order_apart_from_the_document_is_asked(around: str, breaks: str) -> None:
    text = AROUND[around].format(order=ORDER, document=DOCUMENT)
    pieces = re.findall(breaks, text)
    ends = np.cumsum([len(piece) for piece in pieces])
    at = text.index(ORDER)
    start, end = np.searchsorted(ends, [at, at + len(ORDER) - 1], side="right")
    found = possible_questions([], len(pieces), read(pieces), CONFIG)
    assert any(ask.start <= start and end < ask.end for ask in found)
    assert sum(ask.end - ask.start for ask in found) <= 64


def by_text(text: str, system: str = "") -> dict[str, float]:
    """Return what may ask in a user message, behind a system message, with its weight."""
    pieces = re.findall(BREAKS[0], f"{system}{text}")
    at = len(re.findall(BREAKS[0], system))
    spans = [PromptSpan("system", 0, 0, at, at)] * bool(system) + [PromptSpan("user", at, at, len(pieces), len(pieces))]
    found = possible_questions(spans, len(pieces), read(pieces), CONFIG)
    return {"".join(pieces[ask.start : ask.end]).strip(): ask.weight for ask in found}


ASKING = "\n".join([LONG, "Who is the owner?", *[LONG] * 6, "Where is the port?", LONG])  # a document's own
ORDERS = (
    "who owns the ports of Norway",
    "Please list the ports.",
    "## Pilot's question: ports closed in winter",
    "Nenne bitte die Häfen.",
    ORDER,
)
NO_ORDERS = (
    "When the port was built, all left.",
    "list = [port for port in ports]",
    "    Give the port.",
    "The question of ports: none is open.",
)


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_asks_where_people_do(order: str) -> None:
    assert by_text(f"{order}\n{ASKING}")[order] > 2


@pytest.mark.parametrize("line", NO_ORDERS)
def test_what_is_no_order_asks_no_louder_than_text(line: str) -> None:
    assert by_text(f"{ASKING}\n{line}\n{ASKING}").get(line.strip(), 1) == 1


def test_a_system_message_asks_where_the_document_is_alone() -> None:
    told = "We need the ports that are closed in winter."
    assert by_text(ASKING, f"You know harbours. {told}\n")[told] > 1
    assert by_text(f"We need the names.\n\n{ASKING}", f"You know harbours. {told}\n")[told] == 1


# People begin with the order and go on with the text as it comes: without a blank line, in the same line, behind a
# sentence about themselves, in any language. The text may have short lines or end with a question.
BEGUN = {
    "in the text's line": f"Перепиши понятнее: {LONG}\n{ASKING}",
    "behind another sentence": f"I run a small port and have to plan the winter. Перепиши понятнее {LONG}\n{ASKING}",
    "before a question of the text": f"Rewrite this text, перепиши понятнее.\n\n{LONG}\n\nWho owns the ships?",
}


@pytest.mark.parametrize("text", BEGUN.values(), ids=BEGUN)
def test_a_message_begins_with_its_order(text: str) -> None:
    assert any("ерепиши понятнее" in line for line in by_text(text))


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
