"""A pair inside a Python program."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_specprefill import InvalidRequestError
from mlx_specprefill_server import LocalPair, open_pair
from mlx_specprefill_server.pairs import PairsError

from .conftest import haystack


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalPair]:
    with open_pair("demo") as opened:
        yield opened


def ask(pair: LocalPair, **options: Any) -> Any:
    return pair.chat([{"role": "user", "content": haystack("Boris", "552310", 1500, 0.3, seed=1)}], **options)


def test_the_answer_is_right_after_a_sparse_prefill_and_comes_in_pieces(pair: LocalPair) -> None:
    pieces: list[str] = []
    answer = ask(pair, specprefill=True, on_text=pieces.append)
    assert "552310" in answer.text
    assert "".join(pieces) == answer.text
    assert "<|" not in answer.text
    assert (answer.finish_reason, answer.report.mode) == ("stop", "sparse")
    assert answer.report.kept_tokens < answer.report.prompt_tokens // 2


def test_a_text_is_one_message_of_the_user(pair: LocalPair) -> None:
    alone = pair.chat("The code of Paris is 4711. What is the code of Paris?", max_tokens=20)
    assert "4711" in alone.text


@pytest.mark.extended
def test_a_summary_of_the_session_is_known_as_one(pair: LocalPair) -> None:
    said = [
        {"role": "user", "content": haystack("Boris", "552310", 1500, 0.3, seed=2)},
        {"role": "assistant", "content": "552310."},
    ]
    asked = {"role": "user", "content": "Create a summary of the conversation so far."}
    summary = pair.chat([*said, asked], max_tokens=2)
    assert "summarised" in summary.report.reason


def test_options_reach_the_engine(pair: LocalPair) -> None:
    assert ask(pair, specprefill=False, max_tokens=3).report.mode == "full"
    more, less = (ask(pair, specprefill=True, keep=keep, max_tokens=1).report.kept_tokens for keep in (0.5, 0.1))
    assert more > 2 * less
    assert ask(pair, max_tokens=2).finish_reason == "length"


def test_it_works_under_a_running_event_loop_as_in_a_notebook(pair: LocalPair) -> None:
    async def cell() -> str:
        return str(ask(pair, max_tokens=2).text)

    assert asyncio.run(cell())


def test_what_is_wrong_is_said(pair: LocalPair) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages: must not be empty"):
        pair.chat([])
    with pytest.raises(InvalidRequestError, match="keep must be a number"):
        ask(pair, keep=2)
    for wrong in ({}, {"name": "demo", "target": "somewhere"}):
        with pytest.raises(PairsError, match="either the name of a pair or a target"):
            open_pair(**wrong)
    with pytest.raises(TypeError, match="open_pair has no setting draft_layers"):
        open_pair("demo", draft_layers=2)
