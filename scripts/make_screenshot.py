#!/usr/bin/env python3
"""The README's picture: a real server on the bundled pair, a real browser, its sample; needs Chromium.

scripts/make_screenshot.py [docs/images/page.png]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e.conftest import PAIR  # noqa: E402
from tests.serving import start  # noqa: E402

SIZE = {"width": 1360, "height": 860, "deviceScaleFactor": 1, "mobile": False}


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images/page.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = shutil.which("chromedriver")  # selenium looks for one on the network if it is not told
    with (
        tempfile.TemporaryDirectory() as folder,
        start(Path(folder) / "log", *PAIR, "--specprefill-threshold", "512", "--model-alias", "demo") as server,
        webdriver.Chrome(options=options, service=Service(driver) if driver else None) as browser,
    ):
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SIZE)
        browser.get(server.base)
        ask(browser)
        browser.save_screenshot(str(path))
    print(path)


def ask(browser: webdriver.Chrome) -> None:
    """What a new user sees: the sample, asked with one click."""
    wait = WebDriverWait(browser, 300)
    wait.until(lambda page: "tokens" in page.find_element(By.ID, "documents").text)
    browser.find_element(By.ID, "send").click()
    wait.until(lambda page: page.find_elements(By.CSS_SELECTOR, ".headline:not([hidden])"))
    wait.until(lambda page: not page.find_element(By.ID, "stop").is_displayed())


if __name__ == "__main__":
    main()
