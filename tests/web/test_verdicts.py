"""The verdict of full reading on a selective answer: the line below it, and the counts in the server view."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mlx_specprefill import Verdict

from ..server.fakes import FakeEngine
from .conftest import Page
from .test_page import complaints

# What the server says of the last question's answer: the words of `known`, each with this request's name.
STUB = """
const serve = window.fetch;
window.known = [];
window.looks = 0;
window.fetch = async (path, options) => {
  const request_id = options?.headers?.["x-request-id"];
  if (request_id) sessionStorage.setItem("request_id", request_id);
  if (!path.startsWith("/v1/specprefill/verdicts")) return serve(path, options);
  looks += 1;
  const asked = sessionStorage.getItem("request_id");
  return Response.json({ data: known.map((verdict) => ({ request_id: asked, verdict })) });
};
"""
LINES = {
    "same": "Read in full afterwards: the answer is the same.",
    "differs": "Read in full afterwards: the answer differs.",
    "unknown": "Not compared with full reading.",
}


@pytest.fixture(autouse=True)
def verdicts(page: Page) -> Iterator[None]:
    """The page finds a server that gives verdicts."""
    made = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": STUB})
    yield
    page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", made)


def answered(page: Page, live: Any, *known: str) -> None:
    """Ask a question that is read selectively."""
    base, _ = live()
    page.open(base)
    page.run("window.known = arguments[0]", list(known))
    page.set("#mode", "sparse")
    page.ask("How long?")


def verdict(page: Page) -> str:
    page.until(lambda: page.all(".verdict"))
    return page.find(".verdict").text


@pytest.mark.parametrize("word", LINES)
def test_a_verdict_is_waited_for_told_and_kept(word: str, page: Page, live: Any) -> None:
    answered(page, live, "pending")
    page.until(lambda: page.run("return looks") > 0)
    assert page.all(".verdict") == []
    page.run("window.known = [arguments[0]]", word)
    assert verdict(page) == LINES[word]
    assert complaints(page) == []
    page.reload()
    assert verdict(page) == LINES[word]
    more = page.find(".verdict").find_elements("xpath", "following-sibling::button")
    assert [button.text for button in more] == ["Show what full reading answers"] * (word == "differs")
    for button in more:
        button.click()
        page.until(lambda: len(page.all(".arm")) == 2 and page.find("#send").is_displayed())
        assert "answer" in page.all(".arm .facts")[1].text


def test_a_server_that_knows_no_verdict_is_asked_once(page: Page, live: Any) -> None:
    answered(page, live)
    page.until(lambda: page.run("return looks") == 1)
    time.sleep(1.5)
    assert page.run("return looks") == 1
    assert page.all(".verdict") == []


def test_an_answer_that_was_read_in_full_has_no_verdict(page: Page, live: Any) -> None:
    base, _ = live()
    page.open(base)
    page.drop("A text.")
    page.ask("How long?")
    time.sleep(0.8)  # the first look is after half a second
    assert page.run("return looks") == 0


def test_the_server_view_counts_the_verdicts(page: Page, live: Any, engine: FakeEngine) -> None:
    engine.verifies, engine.verdict = True, Verdict(np.ones(1, np.bool_), np.ones(1, np.bool_))
    answered(page, live)
    page.find("nav a[href='#server']").click()
    page.until(lambda: page.find("#verdicts").is_displayed())
    said = "Selective answers after full reading: 1 the same, 0 different, 0 unknown."
    assert page.find("#verdicts").text == said
    page.look("dark", "narrow")
    assert page.fits()
    assert complaints(page) == []
