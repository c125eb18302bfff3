"""The view: the newest answer lies above the composer, and the composer takes little of the window."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from ..server.fakes import FakeEngine
from .conftest import Page

# No two lines alike: the answer is no loop.
PIECES = ["".join(f"Line {row} of {piece}.\n\n" for row in range(40)) for piece in range(3)]
LONG = PIECES[0] + PIECES[1]
ENDS = """
const bottom = (css) => [...document.querySelectorAll(css)].at(-1).getBoundingClientRect().bottom;
return [bottom(".answer"), document.getElementById("form").getBoundingClientRect().top];
"""


def ends(page: Page) -> tuple[float, float]:
    """Return the y of the newest answer's end and of the composer's top."""
    answer, composer = page.run(ENDS)
    return answer, composer


def streams(engine: FakeEngine) -> list[threading.Event]:
    """Make answers of three pieces of 40 lines; each event lets the next piece go."""
    gates = [threading.Event(), threading.Event()]
    engine.script = lambda request: [
        *engine.tokens(PIECES[0], end=False),
        gates[0],
        *engine.tokens(PIECES[1], end=False),
        gates[1],
        *engine.tokens(PIECES[2] + "The end."),
    ]
    return gates


def lines(page: Page) -> int:
    return len(page.all(".answer p"))


@pytest.mark.parametrize("width", ["laptop", "low", "narrow"])
def test_the_view_follows_the_answer_above_the_composer(page: Page, engine: FakeEngine, width: str) -> None:
    gates = streams(engine)
    page.look("light", width)
    page.find("#question").send_keys("Hello", Keys.ENTER)
    for number, gate in enumerate([*gates, None], 1):
        page.until(lambda count=40 * number: lines(page) >= count)
        answer, composer = ends(page)
        assert 0 < answer <= composer
        if gate:
            gate.set()
    page.until(lambda: not page.find("#stop").is_displayed())
    answer, composer = ends(page)
    assert 0 < answer <= composer
    assert page.run("return document.getElementById('form').getBoundingClientRect().bottom <= innerHeight")


def test_the_view_stays_where_somebody_scrolled_up_until_they_are_back(page: Page, engine: FakeEngine) -> None:
    gates = streams(engine)
    page.look("light", "laptop")
    page.find("#question").send_keys("Hello", Keys.ENTER)
    page.until(lambda: lines(page) == 40)
    page.run("scrollTo(0, 300)")
    gates[0].set()
    page.until(lambda: lines(page) == 80)
    assert page.run("return scrollY") == 300
    page.run("scrollTo(0, document.documentElement.scrollHeight)")
    gates[1].set()
    page.until(lambda: lines(page) == 121)
    answer, composer = ends(page)
    assert 0 < answer <= composer


BLANK = """
const boxes = [".welcome", "#form", "#sample-pane"].map((css) => document.querySelector(css).getBoundingClientRect());
const [welcome, form, sample] = boxes;
const top = document.querySelector("header").offsetHeight;
const share = (from, to) => (to - from) / (innerHeight - top);
return [share(welcome.top, form.bottom), share(sample.top, sample.bottom), form.bottom];
"""


def test_the_first_screen_is_filled_and_the_sample_is_one_click_away(page: Page, live: Any) -> None:
    base, _ = live()
    page.open(base, sample=True)
    page.look("light", "laptop")
    page.shoot("first")
    left, right, composer = page.run(BLANK)
    assert left > 0.5
    assert right > 0.9
    assert composer <= 800
    assert page.find("header img").get_property("naturalWidth") > 0
    page.find("#sample").click()  # in sight: nothing is scrolled
    page.until(lambda: page.all(".turn"))
    assert not page.find("#sample-pane").is_displayed()


def test_a_conversation_without_a_document_has_no_second_pane(page: Page) -> None:
    page.look("light", "laptop")
    page.ask("Hello")
    assert not page.find("#map").is_displayed()
    chat = page.find("#chat").rect
    assert abs(chat["x"] - (1280 - chat["x"] - chat["width"])) < 2  # in the middle
    page.drop("A line of words.")
    assert page.find("#map").is_displayed()
    page.ask("And now?")
    assert page.find("#map").is_displayed()
    page.reload()
    assert page.find("#map").is_displayed()


def test_the_composer_grows_with_the_question_and_shrinks_when_it_is_asked(page: Page) -> None:
    page.look("light", "laptop")
    low = page.find("#form").size["height"]
    assert low < 120
    page.set("#question", "One\nof\nfive\nshort\nlines")
    high = page.find("#form").size["height"]
    assert high > low + 60
    page.press("#send")
    assert page.find("#form").size["height"] == low


# Where the newest answer ends, had nothing been scrolled, with the composer below it.
FRAME = """
const box = (css) => document.querySelector(css).getBoundingClientRect();
const answered = [...document.querySelectorAll(".turn")].at(-1).getBoundingClientRect();
const [header, form, map] = [box("header"), box("#form"), box("#map")];
return { top: header.top, composer: form.bottom, pane: map.bottom,
  needed: answered.bottom - header.top + form.height, window: innerHeight };
"""


@pytest.mark.parametrize("width", ["screen", "laptop", "narrow"])
def test_an_answer_that_fits_leaves_the_header_where_it_was(page: Page, width: str) -> None:
    page.look("light", width)
    page.drop("A line of words here. " * 300)
    page.ask("Hello")
    frame = page.run(FRAME)
    assert frame["needed"] < frame["window"]
    assert frame["top"] == 0
    if width != "narrow":  # where the text lies below the conversation
        assert frame["composer"] == pytest.approx(frame["pane"], abs=1)


FRAMED = """
const box = (css) => document.querySelector(css).getBoundingClientRect();
const [header, map] = [box("header"), box("#map")];
return { top: header.top, room: [map.top - header.bottom, innerHeight - map.bottom] };
"""


@pytest.mark.parametrize("width", ["screen", "laptop", "narrow"])
def test_a_longer_answer_leaves_the_header_in_sight_too(page: Page, engine: FakeEngine, width: str) -> None:
    engine.says(LONG)
    page.look("light", width)
    page.drop("A line of words here. " * 300)
    page.ask("Hello")
    assert page.run("return scrollY") > 300
    framed = page.run(FRAMED)
    assert framed["top"] == 0
    answer, composer = ends(page)
    assert 0 < answer <= composer
    if width != "narrow":  # where the text lies below the conversation
        assert min(framed["room"]) >= 16


def test_a_conversation_is_opened_at_its_end_and_reloaded_where_it_was(page: Page, engine: FakeEngine) -> None:
    engine.says(LONG)
    page.look("light", "laptop")
    page.ask("Hello")
    page.run("scrollTo(0, 300)")
    page.reload()
    assert page.run("return scrollY") == 300
    page.find("#new").click()
    page.until(lambda: not page.all(".turn"))
    page.find("#shelf-button").click()
    page.find("#conversations button").click()
    page.until(lambda: page.all(".turn"))
    answer, composer = ends(page)
    assert 0 < answer <= composer


@pytest.mark.parametrize("width", ["laptop", "narrow"])
def test_each_view_stays_where_it_was_scrolled_to(page: Page, engine: FakeEngine, width: str) -> None:
    engine.says(LONG)
    page.look("light", width)
    page.ask("Hello")
    page.run("scrollTo(0, 1300)")
    page.find("nav a[href='#server']").click()
    page.until(lambda: page.find("#server").is_displayed())
    assert page.run("return scrollY") == 0
    page.find("nav a[href='#ask']").click()
    page.until(lambda: page.find("#chat").is_displayed())
    page.until(lambda: page.run("return scrollY") == 1300, within=5)
