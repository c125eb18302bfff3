"""The target reads the question that it is to answer, wherever it stands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlx_specprefill_evals.tasks import PLACE_TASKS, TASKS, Space, make_item
from mlx_specprefill_server.local import LocalPair, open_pair
from tests.support.reading import text_read

KINDS = {"prose": 0, "law": 1, "code": 2, "log": 3, "table": 4, "json": 5}
LENGTH = 1500


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPair]:
    with open_pair("demo", densify="off", calibration_file=tmp_path_factory.mktemp("costs") / "costs.json") as opened:
        yield opened


def question_of(number: int, pair: LocalPair) -> str:
    """Return the question, which is a message of its own behind its document."""
    return item_of("place_turn_after", number, pair).turns[-1].question


def item_of(task: str, number: int, pair: LocalPair):
    def count(text: str) -> int:
        return len(pair.engine.pair.tokenizer.encode(text, add_special_tokens=False))

    return make_item(TASKS[task], task, number, Space(LENGTH, count, number=number))


@pytest.mark.parametrize(
    "kind", [kind if kind in ("prose", "code") else pytest.param(kind, marks=pytest.mark.extended) for kind in KINDS]
)
@pytest.mark.parametrize("mark", ["?", "."])
def test_in_every_place(pair: LocalPair, kind: str, mark: str) -> None:
    """With its question mark, and without one: then it may be an order."""
    question = question_of(KINDS[kind], pair)
    unread = []
    for task in PLACE_TASKS:
        item = item_of(task, KINDS[kind], pair)
        said = [message | {"content": message["content"].replace("?", mark)} for message in item.messages]
        unread += [] if question.replace("?", mark) in text_read(pair, said) else [task]
    assert unread == []


ORDER = "Please read all of the text below with care, and then tell me what it says about the normal form of names."


def test_an_order_in_front_of_a_document(pair: LocalPair) -> None:
    """Longer than what is kept of any message's beginning."""
    document = item_of("place_turn_before", 0, pair).turns[-1].question
    assert ORDER in text_read(pair, [{"role": "user", "content": f"{ORDER}\n\n{document}"}])


@pytest.mark.parametrize("order", ["Quote the sentence about the lighthouse.", "Fasse den Text zusammen"])
def test_an_order_in_the_message_before(pair: LocalPair, order: str) -> None:
    document = item_of("place_end", 0, pair).turns[-1].question
    messages = [{"role": "user", "content": order}, {"role": "assistant", "content": "Send the text."}]
    assert order in text_read(pair, [*messages, {"role": "user", "content": document}])


def test_an_offer_that_the_last_message_accepts(pair: LocalPair) -> None:
    document = item_of("place_end", 0, pair).turns[-1].question
    offer = "I can quote the rule for private names, or the one for the normal form."
    messages = [{"role": "user", "content": document}, {"role": "assistant", "content": offer}]
    assert offer in text_read(pair, [*messages, {"role": "user", "content": "The second one."}])
