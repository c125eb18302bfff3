"""Conversations: kept over a reload, several of them, renamed, exported, deleted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from ..server.fakes import FakeEngine
from .conftest import Page


def test_a_reload_loses_nothing(page: Page, engine: FakeEngine) -> None:
    page.drop("The text. " * 30)
    page.set("#system", "Be brief.")
    page.ask("What is it?")
    before = page.find("#turns").text, page.find("#prompt").text, page.find("#map-facts").text
    page.drop("Another text.", "more.txt")
    page.find("#question").send_keys("And n")
    page.reload()
    assert (page.find("#turns").text, page.find("#prompt").text, page.find("#map-facts").text) == before
    assert page.find("#question").get_property("value") == "And n"
    assert "more.txt" in page.find("#documents").text
    page.ask("ow?")
    said = engine.pair.tokenizer.decode(engine.requests[-2].prompt.tolist())
    for part in ("Be brief.", "The text. The text.", "What is it?", "Hello", "Another text.", "And now?"):
        assert part in said


def test_a_browser_that_keeps_nothing_can_still_ask(page: Page, live: Any, engine: FakeEngine) -> None:
    base, _ = live()
    refuse = "IDBFactory.prototype.open = () => { throw new DOMException('not in this window', 'SecurityError') }"
    made = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": refuse})
    page.open(base)
    assert page.ask("What is it?").find_element("css selector", ".answer").text == "Hello"
    page.until(lambda: "can't be kept in the browser: not in this window" in page.find("#notice").text)
    page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", made)


def test_an_answer_that_was_coming_when_the_page_was_left(page: Page, engine: FakeEngine) -> None:
    release = threading.Event()
    engine.script = lambda request: [*engine.tokens("The beginning", end=False), release]
    page.drop("The text.")
    page.find("#question").send_keys("Hello")
    page.find("#send").click()
    page.until(lambda: page.all(".answer") and page.find(".answer").text == "The beginning")
    page.reload()
    release.set()
    assert page.all(".bar span")  # where the time went until then
    assert "answer" in page.find(".legend").text
    assert page.find(".question").text == "Hello"
    assert page.find(".answer").text == "The beginning"
    assert "Broken off" in page.find(".turn").text
    page.driver.refresh()  # it is kept from then on
    page.ready()
    assert page.find(".answer").text == "The beginning"


class Tabs:
    """Two tabs of one browser, with the same conversation open in both."""

    def __init__(self, page: Page, base: str) -> None:
        self.page, self._names = page, [page.driver.current_window_handle]
        page.until(lambda: page.find("#chat").get_attribute("data-kept") == "yes")
        page.driver.switch_to.new_window("tab")
        self._names.append(page.driver.current_window_handle)
        page.driver.get(base)
        page.ready()

    def to(self, index: int) -> None:
        self.page.driver.switch_to.window(self._names[index])

    def close(self) -> None:
        self.to(1)
        self.page.driver.close()
        self.to(0)

    def questions(self) -> list[str]:
        return [question.text for question in self.page.all(".question")]


@pytest.fixture
def tabs(page: Page, live: Any, engine: FakeEngine) -> Iterator[Tabs]:
    base, _ = live()
    page.open(base)
    page.ask("First")
    opened = Tabs(page, base)
    yield opened
    opened.close()


def test_what_is_asked_in_two_tabs_is_all_kept(page: Page, tabs: Tabs, engine: FakeEngine) -> None:
    assert tabs.questions() == ["First"]
    page.ask("Second, in the other tab")
    page.reload()
    tabs.to(0)
    page.until(lambda: tabs.questions() == ["First", "Second, in the other tab"])
    page.ask("Third")
    page.reload()
    assert tabs.questions() == ["First", "Second, in the other tab", "Third"]
    assert "Second, in the other tab" in engine.pair.tokenizer.decode(engine.requests[-1].prompt.tolist())


def test_both_of_two_questions_at_once_stay(page: Page, tabs: Tabs, engine: FakeEngine) -> None:
    release = threading.Event()
    engine.script = lambda request: [*engine.tokens("Begun", end=False), release, *engine.tokens(" and ended")]
    for tab, question in enumerate(["In the first tab", "In the second tab"]):
        tabs.to(tab)
        page.find("#question").send_keys(question)
        page.find("#send").click()
        page.until(lambda asked=question: tabs.questions()[-1] == asked)  # the engine takes one at a time
    release.set()
    for tab in (0, 1):
        tabs.to(tab)
        page.until(lambda: [one.text for one in page.all(".answer")[1:]] == ["Begun and ended"] * 2)
        page.reload()
        assert tabs.questions() == ["First", "In the first tab", "In the second tab"]


def test_with_one_tab_no_other_is_named(page: Page, engine: FakeEngine) -> None:
    release = threading.Event()
    engine.script = lambda request: [*engine.tokens("Begun", end=False), release, *engine.tokens(" and ended")]
    page.find("#compare").click()
    page.find("#question").send_keys("Hello")
    page.find("#send").click()
    page.until(lambda: page.all(".answer") and page.find(".answer").text == "Begun")
    assert "another tab" not in page.find(".turn").text
    page.until(lambda: page.find("#chat").get_attribute("data-kept") == "yes")
    page.run("sessionStorage.clear()")
    page.driver.refresh()  # as a tab that was closed and opened again
    page.ready()
    page.until(lambda: page.all(".turn"))
    assert "another tab" not in page.find(".turn").text
    release.set()


def test_another_tab_says_that_an_answer_is_coming(page: Page, tabs: Tabs, engine: FakeEngine) -> None:
    release = threading.Event()
    engine.script = lambda request: [*engine.tokens("Begun", end=False), release, *engine.tokens(" and ended")]
    page.find("#question").send_keys("Second")
    page.find("#send").click()
    tabs.to(0)
    page.until(lambda: tabs.questions() == ["First", "Second"])
    page.until(lambda: page.all(".answer")[-1].text == "Begun")
    assert "Being answered in another tab" in page.all(".turn")[-1].text
    assert "Broken off" not in page.find("#turns").text
    release.set()
    page.until(lambda: page.all(".answer")[-1].text == "Begun and ended")
    assert "another tab" not in page.all(".turn")[-1].text


def test_what_one_tab_took_away_no_other_brings_back(page: Page, tabs: Tabs, engine: FakeEngine) -> None:
    page.ask("Second")
    page.until(lambda: page.find("#chat").get_attribute("data-kept") == "yes")
    page.run("[...document.querySelectorAll('.turn-actions')][0].lastChild.click()")  # edits the first question
    page.find("#edited").clear()
    page.find("#edited").send_keys("Changed")
    page.find("#edited").send_keys(Keys.ENTER)
    page.until(lambda: tabs.questions() == ["Changed"] and page.find("#chat").get_attribute("data-kept") == "yes")
    tabs.to(0)
    page.until(lambda: tabs.questions() == ["Changed"])
    page.ask("Third")
    page.reload()
    assert tabs.questions() == ["Changed", "Third"]


def test_a_new_conversation_begins_with_nothing_of_the_old_one(page: Page, engine: FakeEngine) -> None:
    untouched = page.find("#map-facts").text
    page.drop("The text. " * 30)
    page.ask("What is it?")
    assert page.find("#map-facts").text != untouched
    page.find("#new").click()
    page.until(lambda: not page.all(".turn"))
    assert page.find("#map-facts").text == untouched
    assert not page.find("#prompt").is_displayed()
    assert page.find("#detail").text == ""
    page.ask("Something else")
    assert "The text." not in engine.pair.tokenizer.decode(engine.requests[-1].prompt.tolist())
    page.until(lambda: len(page.all("#conversations li")) == 2)
    page.all("#conversations button")[1].click()
    page.until(lambda: page.all(".question") and page.find(".question").text == "What is it?")
    assert "The text." in page.find("#prompt").text


def test_conversations_are_found_by_their_questions_in_a_drawer(page: Page, engine: FakeEngine) -> None:
    page.look("light", "laptop")
    page.ask("What is it?")
    page.ask("And the zebra?")
    page.find("#new").click()
    page.until(lambda: not page.all(".turn"))
    page.ask("Another question")
    page.until(lambda: len(page.all("#conversations li")) == 2)
    drawer = page.find("#shelf")
    assert not drawer.is_displayed()
    page.find("#shelf-button").click()
    assert drawer.is_displayed()
    page.shoot("drawer")
    page.find("#search").send_keys("Giraffe")
    assert page.find("#none-found").text == "No conversation has these words."
    page.find("#search").clear()
    page.find("#search").send_keys("ZEBRA")
    assert page.find("#conversations").text == "What is it?"
    page.find("#conversations li:not([hidden]) button").click()
    page.until(lambda: len(page.all(".turn")) == 2)
    page.until(lambda: not drawer.is_displayed())
    page.find("#shelf-button").click()
    page.find("#delete").click()
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)  # keeps it
    assert len(page.all(".turn")) == 2
    page.find("#shelf-button").click()
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not drawer.is_displayed()
    page.look("light", "wide")
    assert drawer.is_displayed()  # there is room for it beside the conversation
    assert not page.find("#shelf-button").is_displayed()


def test_a_conversation_is_renamed_exported_and_deleted(page: Page, engine: FakeEngine) -> None:
    engine.says("An *answer*")
    page.run(
        "window.saved = []; URL.createObjectURL = (blob) => { blob.text().then((text) => window.saved.push(text)); "
        "return '#ask' }; HTMLAnchorElement.prototype.click = function () { window.saved.push(this.download) }"
    )
    page.drop("The text.")
    page.ask("What is it?")
    page.until(lambda: page.find("#rename").is_enabled())
    page.find("#rename").click()
    page.find("#title").clear()
    page.find("#title").send_keys("My file: a/b", Keys.ENTER)
    page.until(lambda: page.find("#conversations").text == "My file: a/b")
    for typed, shown in (("nothing", ""), ("my FILE", "My file: a/b"), ("", "My file: a/b")):
        page.set("#search", typed)
        assert page.find("#conversations").text == shown
    page.find("#export-markdown").click()
    page.find("#export-json").click()
    page.until(lambda: page.run("return window.saved.length") == 4)
    saved = page.run("return window.saved")
    assert {"My file a b.md", "My file a b.json"} < set(saved)
    assert "# My file: a/b\n\n## What is it?\n\n- notes.txt (9 tokens)\n\nAn *answer*\n" in saved
    (whole,) = [json.loads(text) for text in saved if text.startswith("{")]
    assert whole["turns"][0]["documents"][0]["text"] == "The text."
    page.find("#delete").click()
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)  # keeps it
    assert len(page.all(".turn")) == 1
    page.find("#delete").click()
    page.find("#delete-dialog [value=use]").click()
    page.until(lambda: not page.all("#conversations li") and not page.all(".turn"))
    page.driver.refresh()
    page.ready()
    assert page.all(".turn") == []
