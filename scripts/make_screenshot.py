#!/usr/bin/env python3
"""The pictures of the page in the documents: a real server on the bundled pair, a real browser; needs Chromium.

scripts/make_screenshot.py [docs/images]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e.conftest import PAIR, haystack  # noqa: E402
from tests.serving import start  # noqa: E402

DESKTOP = {"width": 1360, "height": 900, "deviceScaleFactor": 1, "mobile": False}
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": False}
PATIENCE_S = 300


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "log"
        with start(log, *PAIR, "--specprefill-threshold", "512", "--model-alias", "demo") as server, browser() as page:
            page.get(server.base)
            shoot(page, folder / "page.png", ask)
            shoot(
                page, folder / "page-scores.png", lambda tab: tab.find_element(By.ID, "step-back").click(), theme="dark"
            )
            shoot(page, folder / "page-phone.png", lambda tab: tab.execute_script("scrollTo(0, 0)"), size=PHONE)
            shoot(page, folder / "page-server.png", lambda tab: watch(tab, server.base))


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = shutil.which("chromedriver")  # selenium looks for one on the network if it is not told
    with webdriver.Chrome(options=options, service=Service(driver) if driver else None) as started:
        yield started


def shoot(
    page: webdriver.Chrome,
    path: Path,
    first: Callable[[webdriver.Chrome], object],
    size: dict[str, object] = DESKTOP,
    theme: str = "light",
) -> None:
    """What the page shows after `first`, when colours have settled."""
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": theme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    first(page)
    page.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    page.save_screenshot(str(path))
    print(path)


def ask(page: webdriver.Chrome) -> None:
    """What a new user sees: the sample, asked with one click."""
    wait = WebDriverWait(page, PATIENCE_S)
    wait.until(lambda tab: "tokens" in tab.find_element(By.ID, "documents").text)
    page.find_element(By.ID, "send").click()
    wait.until(lambda tab: tab.find_elements(By.CSS_SELECTOR, ".headline:not([hidden])"))
    wait.until(lambda tab: not tab.find_element(By.ID, "stop").is_displayed())


def watch(page: webdriver.Chrome, base: str) -> None:
    """The server while it reads two texts."""
    page.find_element(By.CSS_SELECTOR, "nav a[href='#server']").click()
    for number, words in enumerate((5000, 2500)):
        text = haystack("Anna", "471128", words, 0.4, seed=number)
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 20}
        asked = {"url": f"{base}/v1/chat/completions", "json": body, "timeout": PATIENCE_S}
        threading.Thread(target=httpx.post, kwargs=asked).start()
    large = "#running .bar .prefill"
    WebDriverWait(page, PATIENCE_S).until(lambda tab: tab.find_elements(By.CSS_SELECTOR, large))


if __name__ == "__main__":
    main()
