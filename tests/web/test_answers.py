"""Answers: Markdown as elements, copied, made again, stopped, made with instructions."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from mlx_specprefill import GenerationRequest, Prediction, PrefixMiss, Timings

from ..server import fakes
from ..server.fakes import FakeEngine
from .conftest import Page
from .test_documents import heard

MARKDOWN = """# Head

A *quiet* and **loud** line with `a < b` and [a link](https://example.org/x?a=1&b=2).
Second line.

1. one
2. two
   - deeper

| a | b |
|---|--:|
| 1 | 2 |

> said

- [x] done

```python
def f(x):
    return x < 1  # <b>
```
"""
BAD = """<img src=x onerror="window.pwned=1"> <b>bold</b>

[click](javascript:window.pwned=2) [data](data:text/html,x) ![pic](https://example.org/p.png)

<script>window.pwned=3</script>
"""


def test_markdown_becomes_elements(page: Page, engine: FakeEngine) -> None:
    engine.says(MARKDOWN)
    answer = page.ask("Show me").find_element("css selector", ".answer")
    found = {css: [part.text for part in answer.find_elements("css selector", css)] for css in (
        "h4", "em", "strong", "p code", "ol > li", "ul > li", "th", "td", "blockquote", "pre code", ".code-head span",
    )}  # fmt: skip
    assert found == {
        "h4": ["Head"],
        "em": ["quiet"],
        "strong": ["loud"],
        "p code": ["a < b"],
        "ol > li": ["one", "two\ndeeper"],
        "ul > li": ["deeper", "☑ done"],
        "th": ["a", "b"],
        "td": ["1", "2"],
        "blockquote": ["said"],
        "pre code": ["def f(x):\n    return x < 1  # <b>"],
        ".code-head span": ["python"],
    }
    link = answer.find_element("css selector", "a")
    assert link.get_attribute("href") == "https://example.org/x?a=1&b=2"
    assert link.get_attribute("rel") == "noopener noreferrer"
    assert answer.find_element("css selector", "p").text.endswith("a link.\nSecond line.")


def test_nothing_of_an_answer_runs_or_loads(page: Page, engine: FakeEngine) -> None:
    engine.says(BAD)
    answer = page.ask("Show me").find_element("css selector", ".answer")
    assert '<img src=x onerror="window.pwned=1"> <b>bold</b>' in answer.text
    assert "<script>window.pwned=3</script>" in answer.text
    assert page.all(".answer img, .answer script, .answer b") == []
    assert [a.get_attribute("href") for a in page.all(".answer a")] == ["https://example.org/p.png"]
    assert "[click](javascript:window.pwned=2)" in answer.text
    assert page.run("return window.pwned") is None


def test_answers_and_code_are_copied_as_they_were_written(page: Page, engine: FakeEngine) -> None:
    engine.says(MARKDOWN)
    page.run("window.copied = []; navigator.clipboard.writeText = async (text) => { window.copied.push(text) }")
    turn = page.ask("Show me")
    page.run("arguments[0].click()", turn.find_element("css selector", ".code button"))
    copy = next(b for b in turn.find_elements("css selector", ".turn-actions button") if b.text == "Copy")
    page.run("arguments[0].click()", copy)
    page.until(lambda: copy.text == "Copied")
    assert page.run("return window.copied") == ["def f(x):\n    return x < 1  # <b>", MARKDOWN]


@pytest.mark.parametrize(
    ("full", "said"),
    [
        ("It is 4.5 m. So it is.", "Same answer."),
        ("It is 4.5 m. Or not?", "Both answers begin with the same sentence."),
        ("It is 4.6 m. So it is.", "The answers differ."),
    ],
)
def test_answers_are_compared(page: Page, engine: FakeEngine, full: str, said: str) -> None:
    engine.script = lambda request: engine.tokens(
        full if request.specprefill.enabled is False else "It is 4.5 m. So it is."
    )
    page.find("#compare").click()
    turn = page.ask("How long?")
    assert turn.find_element("css selector", ".headline").text.endswith(said)


def headline_of(page: Page, live: Any, *, compared: bool = False) -> str:
    """Return what stands above the answer to a question that is read selectively."""
    base, _ = live()
    page.open(base)
    page.set("#mode", "sparse")
    if compared:
        page.find("#compare").click()
    return str(page.ask("Hello").find_element("css selector", ".headline").text)


@pytest.mark.parametrize(("known", "says"), [((0, 0), True), ((0, 490), False), ((490, 0), False), ((490, 490), True)])
def test_times_are_compared_where_both_answers_began_alike(
    page: Page, live: Any, monkeypatch: Any, known: tuple[int, int], says: bool
) -> None:
    """An answer from the cache is no match for one that read everything, nor the other way round."""
    plain = fakes.report_of

    def report(request: GenerationRequest) -> Any:
        cached = known[request.specprefill.enabled is False]
        return replace(plain(request), kept_tokens=500, prompt_tokens=1000, cached_tokens=cached)

    monkeypatch.setattr(fakes, "report_of", report)
    headline = headline_of(page, live, compared=True)
    assert bool(re.search("instead of|full reading:", headline)) == says


def test_what_broke_the_prefix_is_told(page: Page, monkeypatch: Any) -> None:
    plain = fakes.report_of
    miss = PrefixMiss("time", 480, 0, "system", 51_000, "It is ", "12:41", "12:42")
    report = {"prompt_tokens": 64_211, "kept_tokens": 64_211, "cached_tokens": 12_480, "miss": miss}
    monkeypatch.setattr(fakes, "report_of", lambda request: replace(plain(request), **report))
    assert page.ask("Hello").find_element("css selector", ".miss").text == (
        "12,480 of 64,211 tokens were cached; then the system message differs: 12:41 → 12:42. "
        "Because of it, 51,000 known tokens were read again."
    )


@pytest.mark.parametrize(
    ("mode", "reused", "dropped", "headline", "facts"),
    [
        (
            "reuse",
            4000,
            0,
            "67 % of the document was not read again. Already read: 5,000 of 6,000 tokens.",
            "The model read 1,000 of 6,000 tokens; 4,000 behind an edit stay as they were read before",
        ),
        (
            "reuse",
            1200,
            3000,
            "70 % of the document was not read, or not again. Already read: 2,000 of 3,000 tokens.",
            "1,200 behind an edit stay as they were read before, and 3,000 unread",
        ),
        # as the next turn
        ("sparse", 0, 0, "All of the document was read. Already read: 5,000 of 6,000 tokens.", "6,000 tokens (100 %)"),
    ],
)
def test_behind_an_edit_it_says_what_stays(
    page: Page, monkeypatch: Any, mode: str, reused: int, dropped: int, headline: str, facts: str
) -> None:
    plain, all_of_it = fakes.report_of, 6000
    counts = {"prompt_tokens": all_of_it, "reused_tokens": reused} | {
        "kept_tokens": all_of_it - dropped,
        "cached_tokens": all_of_it - dropped - 1000,
    }
    monkeypatch.setattr(fakes, "report_of", lambda request: replace(plain(request), mode=mode, **counts))
    page.drop("A text.")
    turn = page.ask("Where?")
    assert headline in turn.find_element("css selector", ".headline").text
    assert facts in turn.find_element("css selector", ".facts").text


def test_the_sample_is_read_selectively_and_its_answers_are_short(page: Page, live: Any, engine: FakeEngine) -> None:
    """Small models go on and on, and whoever tries it waits for both answers."""
    base, _ = live()
    page.open(base, sample=True)
    engine.script = lambda request: engine.tokens(
        f"read {'in full' if request.specprefill.enabled is False else 'in part'}"
    )
    page.press("#sample")
    page.find("#more button").click()  # goes on from the answer of full reading, and where that was read
    page.until(lambda: len(page.all(".turn")) == 2 and page.find("#send").is_displayed())
    assert len(page.all("#more button")) == 1
    assert "read in full" in heard(engine)
    assert "read in part" not in heard(engine)
    answered = [request for request in engine.requests if request.max_tokens > 1]
    assert [request.max_tokens for request in answered] == [128, 128, 2048]
    # and it is read selectively, also where that would save little
    assert [request.specprefill.enabled for request in answered] == [True, False, None]
    assert len({request.label for request in answered[1:]}) == 1 != len({request.label for request in answered})


def test_where_an_answer_is_cut_off_it_says_why(page: Page, engine: FakeEngine, monkeypatch: Any) -> None:
    engine.says("One two three", end=False)
    page.set("#length", "3")
    assert "answered, cut off there: the longest that was asked for" in page.ask("Go on").text
    plain = fakes.report_of
    monkeypatch.setattr(fakes, "report_of", lambda request: replace(plain(request), ended="loop: the same"))
    assert "answered, cut off there: loop: the same" in page.ask("Go on").text


def test_an_answer_is_made_again(page: Page, engine: FakeEngine) -> None:
    page.drop("The text.")
    page.ask("What is it?")
    page.ask("And then?")
    engine.says("Another answer")
    page.all(".turn")[0].find_element("xpath", ".//button[.='Ask again']").click()
    page.until(lambda: len(page.all(".turn")) == 1 and page.find(".answer").text == "Another answer")
    assert "The text.\n\nWhat is it?" in heard(engine)
    assert "And then?" not in heard(engine)


def test_a_sent_question_is_edited_and_asked_with_its_document(page: Page, engine: FakeEngine) -> None:
    page.drop("The text.")
    page.ask("What is it?")
    page.ask("And then?")
    engine.says("Another answer")
    page.all(".turn")[0].find_element("xpath", ".//button[.='Edit…']").click()
    assert page.find("#edited").get_property("value") == "What is it?"
    page.find("#edited").clear()
    page.find("#edited").send_keys("Who is it?")
    page.find("#edit-dialog .primary").click()
    page.until(lambda: len(page.all(".turn")) == 1 and page.find(".answer").text == "Another answer")
    assert page.find(".question").text == "Who is it?"
    assert "The text.\n\nWho is it?" in heard(engine)


def test_a_short_question_has_no_apparatus(page: Page, engine: FakeEngine) -> None:
    release = threading.Event()
    engine.script = lambda request: [*engine.tokens("Good", end=False), release, *engine.tokens(" day")]
    page.find("#question").send_keys("Hello", Keys.ENTER)
    page.until(lambda: page.all(".answer") and page.find(".answer").text == "Good")
    assert not page.find(".timeline").is_displayed()
    release.set()
    page.until(lambda: not page.find("#stop").is_displayed())
    turn = page.find(".turn")
    shown = [part for css in (".headline", ".timeline", ".why") for part in turn.find_elements("css selector", css)]
    assert [part.is_displayed() for part in shown] == [False] * 3
    assert [button.text for button in turn.find_elements("css selector", ".turn-actions button") if button.text] == [
        "Copy",
        "Ask again",
        "Edit…",
    ]
    assert len(engine.requests) == 1  # and no explanation was asked for


def test_waiting_in_the_queue_is_told_apart(page: Page, live: Any, engine: FakeEngine, monkeypatch: Any) -> None:
    release = threading.Event()

    def later(_: GenerationRequest) -> list[Any]:
        threading.Timer(0.5, release.set).start()
        return [release, *engine.tokens("Hello")]

    engine.script = later
    plain = fakes.report_of
    waited = Timings(queue_ms=400, draft_ms=10, select_ms=1, prefill_ms=20, ttft_ms=31, decode_ms=4)
    predicted = Prediction(60_000.0, 31.0)
    monkeypatch.setattr(
        fakes, "report_of", lambda request: replace(plain(request), timings=waited, predicted=predicted)
    )
    headline = headline_of(page, live)
    waiting = re.search(r"waiting ([\d.]+ m?s)", page.find(".legend").text)
    assert waiting is not None
    assert f", {waiting[1]} of it waiting. 50 %" in headline  # one number for one thing
    assert "instead" not in headline


def test_a_full_reading_that_waited_is_no_comparison(page: Page, live: Any, monkeypatch: Any) -> None:
    plain = fakes.report_of
    waited = Timings(queue_ms=2_000, draft_ms=10, select_ms=1, prefill_ms=20, ttft_ms=31, decode_ms=4)

    def report(request: GenerationRequest) -> Any:
        made = plain(request)
        return replace(made, timings=waited) if request.specprefill.enabled is False else made

    monkeypatch.setattr(fakes, "report_of", report)
    headline = headline_of(page, live, compared=True)
    assert not re.search("instead of|full reading:", headline)


def test_a_prediction_that_was_missed_is_not_advertised(page: Page, live: Any, monkeypatch: Any) -> None:
    plain = fakes.report_of
    monkeypatch.setattr(fakes, "report_of", lambda request: replace(plain(request), predicted=Prediction(0.001, 0.001)))
    assert "instead" not in headline_of(page, live)


def test_instructions_temperature_and_length_reach_the_model(page: Page, engine: FakeEngine) -> None:
    page.find("[popovertarget=settings]").click()
    page.find("#system").send_keys("Be brief.")
    page.find("#temperature").send_keys("0.7")
    page.set("#length", "33")
    page.set("#keep", "share")
    page.set("#share", "35")
    page.ask("Hello")
    asked = engine.requests[-1]
    assert heard(engine).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert (asked.sampling.temperature, asked.max_tokens) == (0.7, 33)
    assert float(asked.specprefill.keep_pct or 0) == 0.35
    page.find("#new").click()
    page.until(lambda: page.find("#system").get_property("value") == "")  # of that conversation only


def test_escape_stops_and_what_was_said_stays(page: Page, engine: FakeEngine) -> None:
    release = threading.Event()
    engine.script = lambda request: [*engine.tokens("The beginning", end=False), release]
    page.find("#question").send_keys("Hello", Keys.ENTER)
    page.until(lambda: page.all(".answer") and page.find(".answer").text == "The beginning")
    page.find("#question").send_keys(Keys.ESCAPE)
    page.until(lambda: "Stopped." in page.find(".turn").text)
    release.set()
    assert page.find(".answer").text == "The beginning"
    assert page.find("body").text.count("Stopped.") == 1
    page.find("#question").send_keys("a", Keys.SHIFT, Keys.ENTER, Keys.NULL, "b")
    assert page.find("#question").get_property("value") == "a\nb"


def test_a_stop_keeps_the_size_of_the_conversation_and_the_text_of_the_answer_before(
    page: Page, engine: FakeEngine
) -> None:
    page.drop("The river waited for the stone bridge. " * 60)
    page.ask("Where?")
    known = page.find("#room").text, page.find("#prompt").text
    assert re.match(r"\d[\d,]+ of 100,000 tokens", known[0])
    release = threading.Event()
    engine.script = lambda request: [*engine.tokens("The beginning", end=False), release]
    page.find("#question").send_keys("And who?", Keys.ENTER)
    page.until(lambda: page.all(".answer")[-1].text == "The beginning")
    page.find("#question").send_keys(Keys.ESCAPE)
    page.until(lambda: "Stopped." in page.all(".turn")[-1].text)
    release.set()
    page.until(lambda: (page.find("#room").text, page.find("#prompt").text) == known)


@pytest.mark.parametrize(
    ("cached", "said"),
    [(0, "Why everything was read: short prompt."), (983, "Only 17 tokens were new."), (999, "Nothing new to read.")],
)
def test_nothing_new_to_read_is_a_fact_and_no_warning(page: Page, monkeypatch: Any, cached: int, said: str) -> None:
    plain = fakes.report_of
    report = {"prompt_tokens": 1000, "kept_tokens": 1000, "cached_tokens": cached}
    monkeypatch.setattr(fakes, "report_of", lambda request: replace(plain(request), **report))
    page.drop("A text.")
    assert page.ask("Where?").find_element("css selector", ".why").text == said
    colours = page.run("return ['.why', '.facts'].map((css) => getComputedStyle(document.querySelector(css)).color)")
    assert (colours[0] == colours[1]) == (cached > 0)
