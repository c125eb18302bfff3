"""The sample: asked with one click, and never mixed with what somebody brings."""

from __future__ import annotations

from typing import Any

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
