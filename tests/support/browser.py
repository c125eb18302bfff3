"""The browser that the tests of the page need."""

from __future__ import annotations

import shutil

__all__ = ["NO_BROWSER", "browser"]

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NO_BROWSER = "no Chromium here; .ci/run installs one"


def browser() -> str | None:
    """The program, if there is one."""
    return next((path for path in map(shutil.which, CHROMIUM) if path), None)
