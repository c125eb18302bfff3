"""The text as it was read: it agrees with the answer beside it, and says why."""

from __future__ import annotations

import re
from itertools import pairwise

import httpx
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.support.serving import Server

from ..e2e.conftest import haystack
from .conftest import Page


def figures(text: str) -> tuple[str, ...]:
    found = re.search(r"read ([\d,]+) of ([\d,]+) tokens \((\d+) %\)", text)
    assert found, text
    return found.groups()


def test_a_full_reading_is_shown_as_one(page: Page) -> None:
    page.drop("The river waited for the stone bridge. " * 20)
    page.set("#mode", "full")
    turn = page.ask("Where?")
    assert "The model read all" in turn.text
    assert "The model read all" in page.find("#map-facts").text
    assert page.all("#prompt .dropped") == []
    assert not page.find("#steps").is_displayed()
    page.set("#what-if", "20")
    assert page.find("#steps").is_displayed()
    assert page.all("#prompt .dropped")


@pytest.mark.nightly
def test_another_share_is_what_the_server_would_choose(page: Page, server: Server) -> None:
    document, question = haystack("Emma", "667788", 900, 0.5, seed=24).rsplit("\n\n", 1)
    page.open(server.base)
    page.score(question, document)
    for percent in (5, 12, 33, 70, 100):
        page.set("#what-if", str(percent))
        body = {"messages": [{"role": "user", "content": f"{document}\n\n{question}"}]}
        body["specprefill_keep_pct"] = percent / 100
        told = httpx.post(f"{server.base}/v1/specprefill/explain", json=body, timeout=120).json()
        shown = page.run(
            "return [...document.querySelectorAll('#prompt [data-index]')].map((s) => s.className.split(' ')[0])"
        )
        whole = [chunk["kept_tokens"] == chunk["end"] - chunk["start"] for chunk in told["chunks"]]
        assert [state != "dropped" for state in shown] == whole
        assert figures(page.find("#map-facts").text)[0].replace(",", "") == str(told["kept_tokens"])
    page.find("#as-read").click()
    assert "would read" in page.find("#map-facts").text
    scores = [chunk["score"] for chunk in told["chunks"]]
    alike = [before == score for before, score in pairwise(scores)]
    shared = alike.index(True, 4) + 1  # behind what is always kept
    alone = next(i for i in range(5, len(scores)) if not alike[i - 1] and not alike[i])
    for index, whole_line in ((shared, True), (alone, False)):
        page.run(f"document.getElementById('chunk-{index}').click()")
        said = page.find("#detail").text
        assert f"Its score is number {told['chunks'][index]['rank']} of " in said
        assert ("It has the score of its whole line or sentence." in said) == whole_line


def test_parts_are_explained_by_mouse_and_keyboard(page: Page) -> None:
    page.score("Where?", "The river waited for the stone bridge. " * 20)
    prompt, detail = page.find("#prompt"), page.find("#detail")
    prompt.send_keys(Keys.HOME)
    assert "Always kept: first chunk." in detail.text
    prompt.send_keys(Keys.ARROW_DOWN)
    assert "Would not be read. Its score is number 2 of" in detail.text
    prompt.send_keys("n")
    assert "Read for its score. Its score is number 3 of" in detail.text
    assert page.find("[aria-selected=true]").get_attribute("id") == prompt.get_attribute("aria-activedescendant")
    page.find("#chunk-3").click()
    assert "number 4 of" in detail.text
    page.find("[data-show=kept]").click()
    assert not page.find("#chunk-3").is_displayed()
    assert page.find("#chunk-2").is_displayed()
    page.find("[data-show=dropped]").click()
    assert page.find("#chunk-3").is_displayed()
    assert page.find("#prompt .gap").text == "32 tokens read"


SCORED = """
return [...document.querySelectorAll('#prompt [data-index]')].map((span) => getComputedStyle(span).backgroundColor)
"""
MINIMAP = """
const { canvas, list } = { canvas: document.getElementById("minimap"), list: document.getElementById("prompt") };
const { width, height } = canvas;
const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
copy.drawImage(canvas, 0, 0);
const { data } = copy.getImageData(0, 0, width, height);
const alpha = (x, y) => data[4 * (y * width + x) + 3];
const rows = Array.from({ length: height }, (_, y) => y);
return { painted: rows.filter((y) => alpha(0, y) === 255).length / height, // bars
  seen: rows.filter((y) => Math.abs(alpha(width - 1, y) - .14 * 255) < 2).map((y) => y / height), // a translucent mark
  shown: [list.scrollTop / list.scrollHeight, (list.scrollTop + list.clientHeight) / list.scrollHeight] };
"""


def test_scores_are_a_layer_of_their_own(page: Page) -> None:
    page.score("Where?", "The river waited for the stone bridge. " * 20)
    without = page.run(SCORED)
    assert len(set(without)) == 2  # what is read and what is not
    page.find("#scores").click()
    scored = page.run(SCORED)
    assert len(set(scored[::2])) == 6  # of what is read; the best are first
    assert scored[0] != without[0]
    assert scored[-1] == without[-1]
    page.find("#scores").click()
    assert page.run(SCORED) == without


def test_the_minimap_shows_the_whole_text_and_goes_anywhere_in_it(page: Page) -> None:
    page.score("Where?", "The river waited for the stone bridge. " * 200)
    page.until(lambda: page.run(MINIMAP)["seen"])
    picture = page.run(MINIMAP)
    assert picture["painted"] > 0.6
    minimap = page.find("#minimap")
    for share in (0.9, 0.1):
        below = int(minimap.size["height"] * (share - 0.5))
        ActionChains(page.driver).move_to_element_with_offset(minimap, 0, below).click().perform()
        chosen = int(page.find("[aria-selected=true]").get_attribute("data-index"))
        assert chosen / len(page.all("#prompt [data-index]")) == pytest.approx(share, abs=0.02)
        page.until(lambda at=share: at - 0.2 < min(page.run(MINIMAP)["seen"]) < at < max(page.run(MINIMAP)["seen"]), 20)
        picture = page.run(MINIMAP)
        assert (min(picture["seen"]), max(picture["seen"])) == pytest.approx(picture["shown"], abs=0.05)
