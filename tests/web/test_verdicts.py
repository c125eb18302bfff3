"""The verdict of full reading on a selective answer: the line below it, the place in it, the way on from there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.remote.webelement import WebElement

from mlx_specprefill import GenerationRequest

from ..server.fakes import FakeEngine
from .conftest import Page
from .test_documents import heard
from .test_page import complaints

ANSWER = "It *is* 4.5 m. 🌊 So it is."
BEGUN = "It *is* 4.5 m. 🌊 So "
FULL = "it was. And more."
# What the server says of the last question's answer: `known`, one after the other, each with this request's name.
STUB = """
const serve = window.fetch;
window.known = [];
window.looks = 0;
window.fetch = async (path, options) => {
  const request_id = options?.headers?.["x-request-id"];
  if (request_id) sessionStorage.setItem("request_id", request_id);
  if (!path.startsWith("/v1/specprefill/verdicts")) return serve(path, options);
  looks += 1;
  return Response.json({ data: known.map((one) => ({ request_id: sessionStorage.getItem("request_id"), ...one })) });
};
"""
SAME = {"verdict": "same", "sampled": False, "first": None}
DIFFERS = {"verdict": "differs", "sampled": False, "first": {"token_index": 4, "text_offset": len(BEGUN)}}


@pytest.fixture(autouse=True)
def verdicts(page: Page) -> Iterator[None]:
    """The page finds a server that gives verdicts."""
    made = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": STUB})
    yield
    page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", made)


def answered(page: Page, live: Any, engine: FakeEngine, *known: dict[str, Any]) -> WebElement:
    """Ask a question that is read selectively, and return its turn."""

    def script(request: GenerationRequest) -> Any:
        prompt = engine.pair.tokenizer.decode(request.prompt.tolist())
        return engine.tokens(FULL if prompt.endswith(BEGUN) else ANSWER)

    engine.script = script
    base, _ = live()
    page.open(base)
    page.run("window.known = arguments[0]", list(known))
    page.set("#mode", "sparse")
    return page.ask("How long?")


def verdict(page: Page) -> str:
    page.until(lambda: page.all(".verdict"))
    return page.find(".verdict").text


def test_an_answer_that_is_the_same_says_so(page: Page, live: Any, engine: FakeEngine) -> None:
    turn = answered(page, live, engine, SAME)
    assert verdict(page) == "Read in full afterwards: the answer is the same."
    assert turn.find_elements("css selector", ".verdict button, .answer mark") == []
    page.reload()
    assert verdict(page) == "Read in full afterwards: the answer is the same."


def test_the_place_is_marked_and_full_reading_goes_on_from_there(page: Page, live: Any, engine: FakeEngine) -> None:
    turn = answered(page, live, engine, DIFFERS)
    said = "Read in full afterwards: from ▸ on, the answer differs. Full reading goes on: it was. Go on from there"
    assert verdict(page) == said
    assert turn.find_element("css selector", ".answer").text == "It is 4.5 m. 🌊 So ▸it is."
    asked = engine.requests[-1]
    assert (asked.specprefill.enabled, asked.sampling.temperature, asked.max_tokens) == (False, 0, 24)
    assert complaints(page) == []
    page.shoot("verdict")
    turn.find_element("css selector", ".verdict button").click()
    page.until(lambda: turn.find_element("css selector", ".answer").text == "It is 4.5 m. 🌊 So it was. And more.")
    page.until(lambda: not page.find("#stop").is_displayed())
    assert heard(engine).endswith(BEGUN)
    last = [request for request in engine.requests if request.max_tokens > 1][-1]
    assert last.specprefill.enabled is False
    assert page.all(".verdict") == []
    assert page.all(".turn") == [turn]


def test_a_verdict_is_waited_for_and_its_reason_is_told(page: Page, live: Any, engine: FakeEngine) -> None:
    answered(page, live, engine, {"verdict": "pending"})
    assert page.all(".verdict") == []
    page.run("window.known = arguments[0]", [{"verdict": "unknown", "reason": "its cache was evicted"}])
    assert verdict(page) == "Not compared with full reading: its cache was evicted."


def test_a_server_that_knows_no_verdict_is_asked_once(page: Page, live: Any, engine: FakeEngine) -> None:
    answered(page, live, engine)
    page.until(lambda: page.run("return looks") == 1)
    time.sleep(1.5)
    assert page.run("return looks") == 1
    assert page.all(".verdict") == []


def test_an_answer_that_was_read_in_full_has_no_verdict(page: Page, live: Any, engine: FakeEngine) -> None:
    base, _ = live()
    page.open(base)
    page.drop("A text.")
    page.ask("How long?")
    time.sleep(0.8)  # the first look is after half a second
    assert page.run("return looks") == 0


def test_the_server_view_counts_the_last_verdicts(page: Page, live: Any, engine: FakeEngine) -> None:
    known = [SAME] * 47 + [DIFFERS] * 2 + [{"verdict": "pending"}, {"verdict": "unknown", "reason": "x"}]
    answered(page, live, engine, *known)
    page.find("nav a[href='#server']").click()
    page.until(lambda: page.find("#verdicts").is_displayed())
    assert page.find("#verdict-count").text == "Of the last 49 selective answers, 47 were the same after full reading."
    assert len(page.all("#verdict-strip .same")) == 47
    assert len(page.all("#verdict-strip .differs")) == 2
    page.look("dark", "narrow")
    assert page.fits()
    assert complaints(page) == []
