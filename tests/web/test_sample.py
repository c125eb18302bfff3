"""The sample: asked with one click, and never mixed with what somebody brings."""

from __future__ import annotations

from typing import Any

import pytest

from ..server.fakes import FakeEngine
from .conftest import Page
from .test_documents import heard


def test_a_question_of_ones_own_is_asked_without_the_sample(page: Page, live: Any, engine: FakeEngine) -> None:
    base, _ = live()
    page.open(base, sample=True)
    turn = page.ask("Hello")
    assert "Sandholm" not in heard(engine)
    assert [len(turn.find_elements("css selector", css)) for css in (".arm", ".chip")] == [1, 0]


def test_a_document_after_the_sample_begins_a_conversation(page: Page, live: Any, engine: FakeEngine) -> None:
    base, _ = live()
    page.open(base, sample=True)
    page.press("#sample")
    assert "Sandholm" in heard(engine)
    page.find("#question").send_keys("What is ")
    page.drop("My own text.")
    page.until(lambda: not page.all(".turn"))
    page.ask("it?")
    assert "My own text.\n\nWhat is it?" in heard(engine)
    assert "Sandholm" not in heard(engine)
    assert len(page.all(".arm")) == 1
    page.until(lambda: len(page.all("#conversations li")) == 2)  # the sample's is kept


@pytest.mark.parametrize(("name", "most"), [("demo", 64), ("llama", 2048)])
def test_the_tiny_pair_answers_shortly_and_says_what_it_can_do(
    page: Page, live: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(engine.pair, "target_id", name)
    base, _ = live()
    page.open(base, sample=True)
    assert ("finds facts in a text, and can do nothing else" in page.find("#intro").text) == (name == "demo")
    assert page.find("#length").get_attribute("placeholder") == str(most)
    page.ask("Hello")
    assert engine.requests[-1].max_tokens == most
    page.set("#length", "2048")  # somebody's choice
    page.ask("Hello again")
    assert engine.requests[-1].max_tokens == 2048
