#!/usr/bin/env python3
"""How long it takes from an empty folder to the page's headline: pip install, serve, open the page, press Ask.

    scripts/first_use.py dist/mlx_specprefill-0.1.0-py3-none-any.whl

A new virtual environment, an empty home, no way out of the machine after the installation; needs Chromium. The pair is
the one of the wheel, `demo`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from make_screenshot import ask, browser
from selenium.webdriver.common.by import By
from try_install import install, offline, served


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    steps: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        with lap(steps, "pip install"):
            command = install(wheel, "pip", Path(name))
        headline = press_the_sample(command, Path(name), steps)
    for step, seconds in steps.items():
        print(f"{step:30} {seconds:6.1f} s")
    load, cores = os.getloadavg()[0], os.cpu_count()
    print(f"{'together':30} {sum(steps.values()):6.1f} s   (load {load:.1f} on {cores} cores)\n{headline}")


def press_the_sample(command: Path, folder: Path, steps: dict[str, float]) -> str:
    """What the page says about its sample; the seconds of each step go into `steps`."""
    environment = offline(folder)
    with ExitStack() as stack:
        with lap(steps, "until serve is ready"):
            base = stack.enter_context(served(command, environment, folder, folder / "log"))
        page = stack.enter_context(browser())
        with lap(steps, "page, Ask, both answers"):
            page.get(base)
            ask(page)
        headline: str = page.find_element(By.CSS_SELECTOR, ".headline").text
        return headline


@contextmanager
def lap(steps: dict[str, float], step: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    steps[step] = time.monotonic() - begun


if __name__ == "__main__":
    main()
