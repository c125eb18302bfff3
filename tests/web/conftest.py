"""Headless Chromium. `MLX_SPECPREFILL_SHOTS=folder` keeps the screenshots, for people to look at."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from ..server.conftest import live as live  # the fixtures of the server's tests
from ..server.fakes import FakeEngine, FakePair

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = {"wide": (1360, 900), "narrow": (390, 844)}


class Page:
    """The browser, and what a person does with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """A tab without memory of others."""
        self.driver.get(address)
        self.driver.execute_script("sessionStorage.clear(); localStorage.clear()")
        self.driver.get(address)

    def find(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, css))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, what: Callable[[], Any], within: float = 60.0) -> Any:
        """The first true value."""
        end = time.monotonic() + within
        while not (value := what()):
            assert time.monotonic() < end, self.find("body").text
            time.sleep(0.05)
        return value

    def drop(self, text: str) -> None:
        """A file from the desktop."""
        self.run(
            "const files = new DataTransfer(); files.items.add(new File([arguments[0]], 'notes.txt'));"
            "document.getElementById('drop').dispatchEvent("
            "  new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true}))",
            text,
        )
        self.until(lambda: self.find("#document").get_property("value") == text)

    def press(self, css: str) -> None:
        """Ask or score, and wait for the end."""
        self.find(css).click()
        self.until(lambda: not self.find("#stop").is_displayed() and self.find("#send").is_enabled(), 120)

    def look(self, theme: str, width: str = "wide") -> None:
        size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {**size, "deviceScaleFactor": 1, "mobile": False}
        )
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def shoot(self, name: str) -> None:
        folder = os.environ.get("MLX_SPECPREFILL_SHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))

    def complaints(self) -> list[str]:
        """What the browser's console holds, apart from answers 401, which it always notes."""
        return [e["message"] for e in self.driver.get_log("browser") if "status of 401" not in e["message"]]


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    binary = next((path for path in map(shutil.which, CHROMIUM) if path), None)
    if binary is None and not os.environ.get("MLX_SPECPREFILL_BROWSER"):
        pytest.skip("no Chromium here; .ci/run installs one")
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
def page(driver: Any, live: Any) -> Iterator[Page]:
    """Depends on `live`, so that the page is left before its server goes."""
    tab = Page(driver)
    tab.look("light")
    driver.get_log("browser")
    yield tab
    complaints = tab.complaints()
    driver.get("about:blank")
    assert complaints == []


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(FakePair(context_length=100_000))
    yield fake
    fake.close()
