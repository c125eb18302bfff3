"""The page over a real server: first on the bundled pair, then with a fake engine for what is rare or large."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from mlx_specprefill import Prediction, Progress, Timings
from tests.support.serving import Server

from ..e2e.conftest import haystack
from ..server import fakes
from ..server.fakes import FakeEngine
from .conftest import Page

AXE = Path(__file__).parent / "axe.min.js"  # axe-core 4.14.1, MPL-2.0, as published
HOSTILE = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'> & </textarea> ${1} "
WATCH_STAGES = """
window.seen = new Set();
new MutationObserver((changes) => {
  for (const { target: { dataset } } of changes) {
    if (dataset.stage) window.seen.add(dataset.stage);
  }
}).observe(document.getElementById("turns"), { attributes: true, subtree: true });
"""
BAR_ENDS = """
return [...document.querySelectorAll(".timeline .bar")].map(
  (bar) => bar.lastElementChild.getBoundingClientRect().left - bar.getBoundingClientRect().left);
"""


BAR_WIDTHS = """
return [...document.querySelectorAll(".timeline .bar")].map(
  (bar) => bar.lastElementChild.getBoundingClientRect().right - bar.getBoundingClientRect().left);
"""


def seconds(shown: str) -> float:
    """A time as the page writes it."""
    value, unit = shown.split()
    return float(value) / {"s": 1, "ms": 1000}[unit]


def complaints(page: Page) -> list[str]:
    """axe-core's, of every impact, about what the page shows now."""
    page.until(lambda: page.run("return document.getAnimations().length === 0"))  # colours between two are nobody's
    page.run(AXE.read_text())
    found = page.driver.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
    assert found["passes"]
    return [f"{v['id']}: {node['target']} {node['failureSummary']}" for v in found["violations"] for node in v["nodes"]]


def test_two_arms_share_one_axis_and_the_text_shows_what_was_read(page: Page, server: Server) -> None:
    document, question = haystack("Anna", "471128", 1300, 0.4, seed=5).rsplit("\n\n", 1)
    page.open(server.base)
    page.run(WATCH_STAGES)
    page.drop(document)
    page.find("#compare").click()
    turn = page.ask(question)
    arms = turn.find_elements("css selector", ".arm")
    for arm, title in zip(arms, ("Selective reading", "Full reading"), strict=True):
        assert arm.find_element("css selector", "h3").text == title
        assert "471128" in arm.find_element("css selector", ".answer").text
    assert {"draft", "prefill", "decode"} <= set(page.run("return [...window.seen]"))
    said = turn.find_element("css selector", ".headline").text
    after = r"First word after (.+?) instead of (.+?)\. 80 % of the document was not read\. Same answer\."
    found = re.fullmatch(after, said)
    assert found, said
    ends = page.run(BAR_ENDS)
    assert ends[0] / ends[1] == pytest.approx(seconds(found[1]) / seconds(found[2]), abs=0.08)
    (lit,) = [span for span in page.all("#prompt .kept") if "471128" in span.text]
    box, frame = lit.rect, page.find("#prompt").rect
    assert frame["y"] <= box["y"] <= frame["y"] + frame["height"]
    assert page.find("#map-facts").text.startswith("The large model read 406 of 2,036 tokens (20 %)")
    for theme in ("light", "dark"):
        for width in ("wide", "narrow"):
            page.look(theme, width)
            page.shoot(f"ask-{theme}-{width}")
            assert page.fits()
        for step in ("step-back", "step-on", "step-on"):  # from the second: the first one has its scores
            page.run(f"document.getElementById('{step}').click()")
            assert complaints(page) == []
        page.run("document.getElementById('step-back').click()")


def test_one_click_shows_what_it_is_about(page: Page, server: Server) -> None:
    page.open(server.base, sample=True)
    assert "The logbook of Sandholm lighthouse" in page.find("#sample-text").text
    page.press("#sample")
    said = page.find(".headline").text
    assert re.match(
        r"First word after [\d.]+ m?s instead of [\d.]+ m?s\. \d\d % of the document was not read\. Same answer\.", said
    )
    assert all("482913" in arm.text for arm in page.all(".arm"))
    page.reload()
    assert page.find(".headline").text == said  # and no second sample
    assert page.all("#documents .chip") == []
    for who, name in (("new inspector", "Edvard Lund"), ("cat", "Bosun")):  # what is offered on such a pair
        assert name in page.ask(f"What is the name of the {who}?").text


def test_a_small_window_is_not_offered_what_it_cannot_hold(page: Page, live: Any, engine: FakeEngine) -> None:
    engine.pair.context_length = 4096
    base, _ = live()
    page.open(base, sample=True)
    page.press("#sample")
    assert "longer than this model's window" in page.find("#notice").text
    assert page.all("#documents .chip") == []
    assert page.find("#question").get_property("value") == ""


def test_without_a_comparison_the_other_way_is_predicted(page: Page, monkeypatch: Any) -> None:
    plain = fakes.report_of
    monkeypatch.setattr(
        fakes, "report_of", lambda request: replace(plain(request), predicted=Prediction(13_300, 4_300))
    )
    page.set("#mode", "sparse")
    turn = page.ask("Hello")
    headline = turn.find_element("css selector", ".headline").text
    assert re.fullmatch(
        r"First word after \S+ m?s\. Full reading: about 15 s, predicted\. 50 % of the text was not read\. ?",
        headline,
    )
    guess = turn.find_element("css selector", ".predicted")
    assert guess.text == "Full reading\nabout 15 s to the first word, predicted"
    own, other = page.run(BAR_WIDTHS)
    assert own < 0.3 * other


def test_one_model_is_not_called_two(page: Page, live: Any, engine: FakeEngine, monkeypatch: Any) -> None:
    """A prompt may be scored by the target's own first layers."""
    plain, release = fakes.report_of, threading.Event()
    times = Timings(draft_ms=4_000, select_ms=20, prefill_ms=1_000, ttft_ms=5_020, decode_ms=300)
    monkeypatch.setattr(fakes, "report_of", lambda request: replace(plain(request), scorer="self", timings=times))
    engine.pair.scores_itself = True
    engine.script = lambda request: [Progress("draft", 3, 12), release, *engine.tokens("Hello")]
    base, _ = live()
    page.open(base)
    assert (
        page.find("#models").text
        == "Model demo/target, its first layers choose what all layers read, window of 100,000 tokens"
    )
    assert page.find("#intro").text.startswith("The model's first layers read all of it")
    page.set("#mode", "sparse")
    page.find("#question").send_keys("Hello", Keys.ENTER)
    page.find("nav a[href='#server']").click()
    page.until(lambda: "first layers read, 25 %" in page.find("#running").text)
    assert "its first layers choose what all layers read" in page.find("#model-list").text
    page.find("nav a[href='#ask']").click()
    release.set()
    page.until(lambda: page.find("#send").is_displayed())
    legend = page.find(".lane .legend").text
    for part in ("first layers read 4.00 s", "model reads 1.00 s"):
        assert part in legend
    assert "The model read 12 of 24 tokens" in page.find(".facts").text
    assert "The model read 12 of 24 tokens" in page.find("#map-facts").text
    page.find("#step-back").click()
    assert "The model's first layers read everything" in page.find("#step").text
    assert "small model" not in page.find("#ask").text.partition("These words")[0]


def test_what_declined_says_why(page: Page) -> None:
    page.drop("A line of words.")
    turn = page.ask("Hello")
    assert turn.find_element("css selector", ".why").text == "Why everything was read: short prompt."
    assert turn.find_element("css selector", ".answer").text == "Hello"
    assert "All of the document was read." in turn.find_element("css selector", ".headline").text


def test_prompts_full_of_markup_are_text(page: Page, engine: FakeEngine) -> None:
    engine.says(HOSTILE)
    page.drop(HOSTILE * 20, name=f"{HOSTILE[:30]}.txt")
    turn = page.ask(HOSTILE)
    assert turn.find_element("css selector", ".answer").text.strip() == HOSTILE.strip()
    assert HOSTILE.strip() in page.run("return document.getElementById('prompt').textContent")
    assert not page.all("#prompt script, #prompt img, #turns script, #turns img, #shelf script")
    assert page.run("return window.pwned") is None


def test_the_key_is_asked_for_and_nothing_shows_without_it(page: Page, live: Any, engine: FakeEngine) -> None:
    engine.script = lambda request: engine.tokens("seen")
    base, _ = live(api_keys=("geheim",))
    page.open(base)
    page.until(lambda: page.find("#key-dialog").is_displayed())
    assert page.find("#models").text == ""
    page.find("#key").send_keys("wrong", Keys.ENTER)
    page.until(lambda: page.find("#key-dialog").is_displayed() and page.find("#key").get_property("value") == "")
    assert page.find("#models").text == ""
    page.find("#key").send_keys("geheim", Keys.ENTER)
    page.until(lambda: "demo/target" in page.find("#models").text)
    kept = page.run("return [JSON.stringify(localStorage), document.cookie]")
    assert kept == ["{}", ""]
    assert page.run("return sessionStorage.getItem('api-key')") == "geheim"
    assert "geheim" not in page.driver.current_url + page.driver.page_source


INNER_OVERFLOW = """
return [...document.querySelectorAll("#server .scroll")].filter((one) => one.scrollWidth > one.clientWidth)
  .map((one) => one.ariaLabel);
"""


def test_the_live_panel_lists_and_drops(page: Page, engine: FakeEngine) -> None:
    page.ask("Hello")
    page.find("nav a[href='#server']").click()
    page.until(lambda: len(page.all("#cache [data-entry]")) == 2)
    page.until(lambda: "short prompt" in page.find("#recent").text)
    assert "Found in cache" in page.find("#now").text
    assert "demo/target" in page.find("#model-list").text
    page.until(lambda: len(page.find("#plots polyline").get_attribute("points").split()) > 1)
    for theme in ("light", "dark"):
        for width in ("narrow", "wide"):
            page.look(theme, width)
            page.shoot(f"server-{theme}-{width}")
            assert page.fits()
            assert page.run(INNER_OVERFLOW) == []
        assert complaints(page) == []
    page.find("#cache [data-entry] button").click()
    page.until(lambda: len(page.all("#cache [data-entry]")) == 1)
    page.find("#drop-all").click()
    page.until(lambda: "Nothing is kept" in page.find("#cache").text)
    assert engine.kept == []


def test_a_word_of_the_server_view_is_explained_where_the_focus_is(page: Page, engine: FakeEngine) -> None:
    page.ask("Hello")
    page.find("nav a[href='#server']").click()
    page.until(lambda: page.all("#recent td.number"))
    explained = page.run("return [...document.querySelectorAll('#server .word')].map((word) => word.textContent)")
    assert {"Found in cache", "Tokens per second", "Texts read before", "Hits", "First word", "Why"} <= set(explained)
    assert not page.find("#tip").is_displayed()
    page.run(
        "[...document.querySelectorAll('#server .word')].find((word) => word.textContent === 'First word').focus()"
    )
    assert page.find("#tip").text == "Time to first token (TTFT), the queue included."
    assert complaints(page) == []
    page.run("document.querySelector('#now .word').focus()")
    page.until(lambda: "decoding" in page.find("#tip").text)
    engine.heartbeat_age_s = 1.5
    page.until(lambda: "1.50 s" in page.find("#now").text)  # new numbers take the focus from nobody
    assert page.find("#tip").is_displayed()
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not page.find("#tip").is_displayed()


def test_requests_in_work_are_lanes(page: Page, live: Any, engine: FakeEngine) -> None:
    release = threading.Event()
    engine.script = lambda request: [Progress("draft", 3, 12), release, *engine.tokens("end")]
    base, _ = live()
    page.open(base)
    page.find("nav a[href='#server']").click()
    page.until(lambda: page.find("#running").text == "Nothing is being answered.")
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    call = threading.Thread(target=lambda: httpx.post(f"{base}/v1/chat/completions", json=body, timeout=60))
    call.start()
    page.until(lambda: "small model reads, 25 %" in page.find("#running").text)
    assert page.all("#running .bar .queue, #running .bar .draft")
    assert complaints(page) == []
    release.set()
    call.join()
    page.until(lambda: page.find("#running").text == "Nothing is being answered.")


def test_the_theme_is_chosen_and_remembered(page: Page) -> None:
    page.find("#theme").click()
    page.find("#theme").click()
    dark = page.run("return getComputedStyle(document.documentElement).backgroundColor")
    page.driver.refresh()
    assert page.find("#theme").text == "Theme: dark"
    assert page.run("return getComputedStyle(document.documentElement).backgroundColor") == dark
    assert dark != "rgb(246, 246, 243)"


def test_what_is_on_its_way_is_fit_for_screen_readers(page: Page, live: Any, engine: FakeEngine) -> None:
    release = threading.Event()
    engine.script = lambda request: [Progress("draft", 3, 12), *engine.tokens("The beginning", end=False), release]
    base, _ = live(api_keys=("geheim",))
    page.open(base)
    page.until(lambda: page.find("#key-dialog").is_displayed())
    found = {"key": complaints(page)}
    page.find("#key").send_keys("wrong", Keys.ENTER)
    page.until(lambda: page.find("#key-refused").is_displayed())
    found["refused"] = complaints(page)
    page.find("#key").send_keys("geheim", Keys.ENTER)
    page.until(lambda: "demo/target" in page.find("#models").text)
    page.find("#question").send_keys("Hello")
    page.find("#send").click()
    page.until(lambda: page.all(".answer") and page.find(".answer").text == "The beginning")
    found["streaming"] = complaints(page)
    page.find("#stop").click()
    page.until(lambda: "Stopped." in page.find("#turns").text)
    release.set()
    found["stopped"] = complaints(page)
    assert all(found == [] for found in found.values()), found


def test_a_refused_key_leaves_a_way_back(page: Page, live: Any, engine: FakeEngine) -> None:
    base, _ = live(api_keys=("geheim",))
    page.open(base)
    page.until(lambda: page.find("#key-dialog").is_displayed())
    assert not page.find("#key-refused").is_displayed()
    page.find("#key").send_keys(Keys.ESCAPE)
    page.until(lambda: "needs an API key" in page.find("#notice").text)
    assert not page.find("#key-dialog").is_displayed()
    page.find("#key-button").click()
    page.find("#key").send_keys("wrong", Keys.ENTER)
    page.until(lambda: page.find("#key-refused").is_displayed())
    page.find("#key").send_keys("geheim", Keys.ENTER)
    page.until(lambda: "demo/target" in page.find("#models").text)
    assert page.find("#notice").text == ""
    assert page.ask("Hello").find_element("css selector", ".answer").text == "Hello"


def test_the_server_view_takes_a_key_without_a_reload(page: Page, live: Any, engine: FakeEngine) -> None:
    base, _ = live(api_keys=("geheim",))
    page.open(base)
    page.until(lambda: page.find("#key-dialog").is_displayed())
    page.find("#key").send_keys(Keys.ESCAPE)
    page.find("nav a[href='#server']").click()
    page.until(lambda: page.find("#key-dialog").is_displayed())
    page.find("#key").send_keys(Keys.ESCAPE)
    page.until(lambda: "Enter a key" in page.find("#live-state").text)
    page.find("#key-button").click()
    page.find("#key").send_keys("geheim", Keys.ENTER)
    page.until(lambda: page.all("#cache [data-entry]"))
    assert page.find("#live-state").text == ""


def test_reasoning_is_shown_apart_from_the_answer(page: Page, engine: FakeEngine) -> None:
    engine.says("<think>Let me see.</think>Good day", end=False)
    turn = page.ask("Hello")
    turn.find_element("css selector", ".thinking summary").click()
    assert turn.find_element("css selector", ".thought").text == "Let me see."
    assert turn.find_element("css selector", ".answer").text == "Good day"
    assert "cut off there" in turn.text


def test_a_busy_server_leaves_the_question_and_no_empty_card(page: Page, live: Any, engine: FakeEngine) -> None:
    engine.full = True
    base, _ = live()
    page.open(base)
    page.drop("some words")
    page.find("#question").send_keys("Hello")
    page.press("#send")
    assert "requests are waiting already" in page.find("#notice").text
    assert page.all(".turn") == []
    assert page.find("#question").get_property("value") == "Hello"
    assert "notes.txt" in page.find("#documents").text
    engine.full = False
    page.press("#send")
    assert page.find(".answer").text == "Hello"
    page.driver.get_log("browser")  # the browser notes what the page has handled


def test_a_server_that_goes_away_in_the_middle(page: Page, live: Any, engine: FakeEngine) -> None:
    release = threading.Event()
    engine.script = lambda request: [*engine.tokens("The beginning", end=False), release]
    base, server = live()
    page.open(base)
    page.find("#question").send_keys("Hello")
    page.find("#send").click()
    page.until(lambda: page.all(".answer") and page.find(".answer").text == "The beginning")
    for connection in list(server.server_state.connections):
        connection.loop.call_soon_threadsafe(connection.transport.abort)
    page.until(lambda: "The answer broke off" in page.find("#notice").text)
    assert page.find("#send").is_enabled()
    assert page.find(".answer").text == "The beginning"
    release.set()
    page.driver.get_log("browser")


def test_a_server_that_is_gone_is_named(page: Page) -> None:
    page.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    page.find("#question").send_keys("Hello")
    page.press("#send")
    assert page.find("#notice").text == "Can't reach the server. Does it still run?"
    assert page.find("#question").get_property("value") == "Hello"


def test_the_focus_is_not_lost_when_an_answer_is_stopped(page: Page, engine: FakeEngine) -> None:
    release = threading.Event()
    engine.script = lambda request: [*engine.tokens("The beginning", end=False), release]
    page.find("#question").send_keys("Hello")
    page.find("#send").click()
    page.until(lambda: page.all(".answer") and page.find(".answer").text == "The beginning")
    page.find("#stop").click()
    page.until(lambda: "Stopped." in page.find("#turns").text)
    assert page.driver.switch_to.active_element.get_attribute("id") == "question"
    release.set()


ON_TOP = """
const { left, top, width } = document.getElementById("detail").getBoundingClientRect();
return document.elementFromPoint(left + width / 2, top + 12).id;
"""


@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_right_to_left_and_large_type_fit(page: Page, engine: FakeEngine, width: str) -> None:
    engine.says("שלום. " * 40)
    page.drop("טקסט ארוך. " * 60, "מסמך ארוך.txt")
    page.look("light", width)
    turn = page.ask("מה הקוד?")
    answer = turn.find_element("css selector", ".answer")
    assert page.run("return getComputedStyle(arguments[0]).direction", answer) == "rtl"
    assert page.run("return getComputedStyle(document.getElementById('prompt')).direction") in ("ltr", "rtl")
    for direction, zoom in (("ltr", "200%"), ("rtl", "100%"), ("rtl", "200%")):
        page.run("document.documentElement.dir = arguments[0]", direction)
        page.run("document.documentElement.style.fontSize = arguments[0] === '200%' ? '30px' : ''", zoom)
        page.shoot(f"{direction}-{zoom.rstrip('%')}-{width}")
        assert page.fits()
        page.run("document.getElementById('detail').scrollIntoView()")
        assert page.run(ON_TOP) == "detail"


COVERED = """
const focused = document.activeElement, box = focused.getBoundingClientRect();
const [left, right] = [Math.max(0, box.left), Math.min(innerWidth, box.right)];
const [top, bottom] = [Math.max(0, box.top), Math.min(innerHeight, box.bottom)];
if (left >= right || top >= bottom) return `${focused.outerHTML.slice(0, 80)} is out of sight`;
const over = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
const labels = [...focused.labels ?? []];
const own = focused.contains(over) || over?.contains(focused) || labels.some((one) => one.contains(over));
return own ? "" : `${focused.outerHTML.slice(0, 80)} lies under ${over?.outerHTML.slice(0, 80)}`;
"""


@pytest.mark.parametrize(
    "width",
    [
        "wide at 200 %",
        pytest.param("wide", marks=pytest.mark.nightly),
        pytest.param("full HD at 200 %", marks=pytest.mark.nightly),
    ],
)
def test_nothing_that_has_the_focus_is_covered(page: Page, width: str) -> None:
    page.drop("The river waited for the stone bridge. " * 60)
    page.set("#mode", "sparse")
    page.find("#compare").click()
    page.look("light", width)
    page.ask("Where?")
    page.find("[popovertarget=settings]").click()
    page.shoot(f"zoomed-{width.partition(' at')[0]}")
    assert page.fits()
    page.run("document.querySelector('.skip').focus()")  # the first stop of the tab key
    page.driver.switch_to.active_element.send_keys(Keys.TAB)
    reached = set()
    for _ in range(50):
        reached.add(page.run("return document.activeElement.id || document.activeElement.textContent"))
        if page.run("return document.activeElement !== document.body"):
            assert page.run(COVERED) == ""
        if page.run("return Boolean(document.activeElement.popoverTargetElement)"):
            page.driver.switch_to.active_element.send_keys(Keys.ENTER)
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
    assert {"new", "What was read", "question", "send", "score", "step-play", "prompt", "what-if"} <= reached


def test_who_wants_no_motion_gets_none(page: Page) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}
    )
    page.drop("The river waited for the stone bridge. " * 20)
    page.set("#mode", "sparse")
    page.ask("Where?")
    page.find("#step-back").click()
    moving = "(e) => getComputedStyle(e).transitionDuration !== '0s'"
    assert page.run(f"return [...document.querySelectorAll('*')].filter({moving}).length") == 0
