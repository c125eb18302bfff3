"""The picker: hidden with one model; with several it says which are in memory, chooses, loads and unloads."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from selenium.webdriver.support.ui import Select

from mlx_specprefill_server.models import loading_stream
from mlx_specprefill_server.models.pool import Models
from mlx_specprefill_server.settings.server import Settings

from ..server.hosting import FakeHost, entry, models_of, running
from ..server.hosting import host as host
from .conftest import Page
from .test_page import complaints


@pytest.fixture
def several(host: FakeHost, page: Page, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Models]]:
    """Its server goes after the page has left it."""
    monkeypatch.setattr(loading_stream, "PROGRESS_S", 0.05)
    models = models_of(host, entry("big"), entry("small", "tiny"), entry("fixed", pin=True))
    with running(host, models, Settings(port=0)) as address:
        yield address, models
        page.driver.get("about:blank")


def options(page: Page) -> list[str]:
    return [option.text for option in Select(page.find("#model")).options]


def test_with_one_model_there_is_nothing_to_choose(page: Page) -> None:
    assert not page.find("#picker").is_displayed()
    page.find("nav a[href='#server']").click()
    assert page.until(lambda: page.all("#model-list li"))
    assert not page.find("#model-list button").is_displayed()


def test_a_model_is_chosen_and_loaded_by_the_first_question(
    page: Page, several: tuple[str, Models], host: FakeHost
) -> None:
    base, _ = several
    page.open(base)
    page.until(lambda: options(page) == ["big: not in memory", "small: not in memory", "fixed: in memory"])
    assert host.loaded == ["fixed"]  # looking at the page loads nothing
    assert "big is loaded with the first question" in page.find("#models").text
    Select(page.find("#model")).select_by_value("small")
    host.held_up.clear()
    page.find("#question").send_keys("Who are you?")
    page.run("arguments[0].click()", page.find("#send"))
    page.until(lambda: "small is being loaded: Loading, 1 of 2" in page.find(".arm .facts").text)
    page.until(lambda: "small: loading…" in options(page))
    page.shoot("loading")
    host.held_up.set()
    page.until(lambda: "I am small" in page.find(".arm .answer").text)
    page.until(lambda: "small: in memory" in options(page))
    page.until(lambda: "Large model small" in page.find("#models").text)
    assert complaints(page) == []
    page.reload()
    assert Select(page.find("#model")).first_selected_option.text == "small: in memory"
    assert host.loaded == ["fixed", "small"]


def test_models_are_loaded_and_unloaded_in_the_server_view(
    page: Page, several: tuple[str, Models], host: FakeHost
) -> None:
    base, models = several
    host.broken["big"] = "its weights are cut off"
    page.open(base)
    page.find("nav a[href='#server']").click()
    page.until(lambda: len(page.all("#model-list li")) == 3)

    def row(number: int) -> str:
        return page.all("#model-list li")[number].text

    def press(number: int) -> None:
        page.all("#model-list li")[number].find_element("css selector", "button").click()

    assert "not in memory · answers as small, tiny" in row(1)
    assert not page.all("#model-list button")[2].is_displayed()  # pinned
    press(1)
    page.until(lambda: "in memory · answers as small, tiny · small model demo/draft" in row(1))
    assert "holds 1.2 KB" in row(1)
    assert complaints(page) == []
    page.shoot("models")
    press(1)
    page.until(lambda: "not in memory · answers as small" in row(1))
    assert models.get("small").state == "unloaded"
    host.held_up.clear()
    press(1)
    page.until(lambda: "loading… · Loading 1 of 2" in row(1))
    host.held_up.set()
    page.until(lambda: "in memory · answers as small" in row(1))
    time.sleep(0.1)
