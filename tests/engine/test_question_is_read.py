"""The target reads the question that it is to answer, wherever it stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_specprefill_evals.tasks import PLACE_TASKS, TASKS, Space, make_item
from mlx_specprefill_server.local import LocalPair, open_pair
from tests.support.reading import text_read

KINDS = 6  # prose, law, code, log, table, JSON
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


@pytest.fixture(scope="module")
def probing(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPair]:
    """A pair whose draft has a probe."""
    costs = tmp_path_factory.mktemp("costs") / "costs.json"
    with open_pair("smollm2", densify="off", calibration_file=costs) as opened:
        yield opened


@pytest.mark.extended
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mark", ["?", "."])
def test_in_every_place(probing: LocalPair, mark: str) -> None:
    """With its question mark, and without one: then it may be an order. Kinds of documents in turns."""
    unread = []
    for number, task in enumerate(PLACE_TASKS):
        kind = number % KINDS
        question, item = question_of(kind, probing), item_of(task, kind, probing)
        said = [message | {"content": message["content"].replace("?", mark)} for message in item.messages]
        unread += [] if question.replace("?", mark) in text_read(probing, said) else [task]
    assert len(unread) <= len(PLACE_TASKS) / 10, unread


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
