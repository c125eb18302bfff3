"""What a new user does: install the sdist or the wheel, start the server from an empty folder, ask, offline.

The installations fetch the dependencies and take a minute, so they run where MLX_SPECPREFILL_INSTALL is set, as in
`.ci/run`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import first_use
import pytest
import try_install

from tests.browser import NO_BROWSER, browser

pytestmark = [
    pytest.mark.skipif(not os.environ.get("MLX_SPECPREFILL_INSTALL"), reason="MLX_SPECPREFILL_INSTALL is not set"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def installed(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, from the wheel with pip."""
    return try_install.install(wheel_file, "pip", tmp_path_factory.mktemp("installed"))


def test_the_wheel_with_pip(installed: Path, wheel_file: Path, tmp_path: Path) -> None:
    assert "demo read " in try_install.use(installed, wheel_file, tmp_path)


@pytest.mark.skipif(not (browser() or os.environ.get("MLX_SPECPREFILL_BROWSER")), reason=NO_BROWSER)
def test_the_first_use_ends_with_the_headline(installed: Path, tmp_path: Path) -> None:
    steps: dict[str, float] = {}
    headline = first_use.press_the_sample(installed, tmp_path, steps)
    assert re.match(r"First word after .+ instead of .+ was not read\. Same answer\.", headline)
    assert len(steps) == 2


def test_the_sdist_with_uv(sdist: Path, tmp_path: Path) -> None:
    assert "demo read " in try_install.try_install(sdist, "uv", tmp_path)
