"""Headless Chromium. `MLX_SPECPREFILL_SHOTS=folder` keeps the screenshots, for people to look at."""

from __future__ import annotations

import inspect
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.support.browser import NO_BROWSER, browser

from ..e2e.conftest import server as server  # the bundled pair, one server for all tests
from ..server.conftest import live as live  # the fixtures of the server's tests
from ..server.fakes import FakeEngine, FakePair

OWN = {"live", "server", "several", "tabs"}  # of which a test opens the page itself
WIDTHS = {
    "wide": (1600, 900),
    "screen": (1440, 900),
    "laptop": (1280, 800),
    "low": (1280, 650),
    "narrow": (390, 844),
    "wide at 200 %": (680, 450),
    "full HD at 200 %": (960, 540),
}


class Page:
    """The browser, and what a person does with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str, sample: bool = False) -> None:
        """A tab without memory of others."""
        self.driver.get("about:blank")  # lets go of the stores
        self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": address, "storageTypes": "all"})
        self.driver.get(address)
        self.run("sessionStorage.clear()")
        self.driver.get(address)
        self.ready()
        if not sample and not self.find("#key-dialog").is_displayed():
            self.find("#new").click()
            self.until(lambda: not self.all("#documents .chip"))

    def ready(self) -> None:
        """The page has loaded what it shows first, unless it asks for a key."""
        begun = "document.documentElement.dataset.ready || document.getElementById('key-dialog').open"
        self.until(lambda: self.run(f"return {begun}"))

    def reload(self) -> None:
        """When what there is has been kept, within a second of the last change."""
        self.until(lambda: self.find("#chat").get_attribute("data-kept") == "yes")
        self.driver.refresh()
        self.ready()

    def find(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, css))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, what: Callable[[], Any], within: float = 60.0) -> Any:
        """The first true value. What the page replaces while it is looked at is looked at again."""
        end = time.monotonic() + within
        while True:
            with suppress(StaleElementReferenceException):
                if value := what():
                    return value
            assert time.monotonic() < end, self.find("body").text
            time.sleep(0.05)

    def drop(self, text: str | bytes, name: str = "notes.txt") -> None:
        """A file from the desktop; waits until it is a document or was refused."""
        data = list(text.encode() if isinstance(text, str) else text)
        before = len(self.all("#documents .chip")), self.find("#notice").text
        self.run(
            "const files = new DataTransfer(); files.items.add(new File([new Uint8Array(arguments[0])], arguments[1]));"
            "document.getElementById('chat').dispatchEvent("
            "  new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true}))",
            data,
            name,
        )
        self.until(lambda: (len(self.all("#documents .chip")), self.find("#notice").text) != before)
        self.until(lambda: not self.find("#notice").text.startswith("Reading "))
        self.until(lambda: "…" not in self.run("return document.getElementById('documents').textContent"))

    def ask(self, question: str) -> WebElement:
        """One question, to the end of its answer: the turn."""
        self.find("#question").send_keys(question)
        self.press("#send")
        return self.all(".turn")[-1]

    def score(self, question: str, document: str) -> None:
        """Press the button that shows which parts of a document a question keeps, without an answer."""
        self.drop(document)
        self.find("#question").send_keys(question)
        self.press("#score")

    def set(self, css: str, value: str) -> None:
        """A switch of the form."""
        self.run(
            "const field = document.querySelector(arguments[0]);"
            "field.value = arguments[1]; field.dispatchEvent(new Event('input', {bubbles: true}))",
            css,
            value,
        )

    def press(self, css: str, within: float = 120.0) -> None:
        """Ask or score, and wait for the end."""
        self.run("arguments[0].click()", self.find(css))  # also where it is folded away
        self.until(lambda: not self.find("#stop").is_displayed() and self.find("#send").is_enabled(), within)

    def look(self, theme: str, width: str = "wide") -> None:
        size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {**size, "deviceScaleFactor": 1, "mobile": False}
        )
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def fits(self) -> bool:
        """Return whether nothing has to be scrolled sideways."""
        return bool(self.run("return document.documentElement.scrollWidth <= innerWidth"))

    def shoot(self, name: str) -> None:
        folder = os.environ.get("MLX_SPECPREFILL_SHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))

    def complaints(self) -> list[str]:
        """Return the messages of the browser's console, without the 401 answers that it always notes."""
        return [e["message"] for e in self.driver.get_log("browser") if "status of 401" not in e["message"]]


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    binary = browser()
    if binary is None and not os.environ.get("MLX_SPECPREFILL_BROWSER"):
        pytest.skip(NO_BROWSER)
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.binary_location = binary or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromedriver = shutil.which("chromedriver")
    with webdriver.Chrome(options=options, service=Service(chromedriver) if chromedriver else None) as started:
        started.set_script_timeout(120)
        yield started


@pytest.fixture
def page(driver: Any, live: Any, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page that is left before its server goes. A test that takes none of `OWN` finds it open."""
    tab = Page(driver)
    tab.look("light")
    driver.get_log("browser")
    if not OWN & inspect.signature(request.function).parameters.keys():
        tab.open(live()[0])
    yield tab
    complaints = tab.complaints()
    driver.get("about:blank")
    assert complaints == []


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(FakePair(context_length=100_000))
    yield fake
    fake.close()
