"""A new user's steps: install the sdist or the wheel, start the server from an empty folder, ask, offline.

The installations fetch the dependencies and take a minute, so they run where MLX_SPECPREFILL_INSTALL is set, as in
`.ci/run`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import try_install

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not os.environ.get("MLX_SPECPREFILL_INSTALL"), reason="MLX_SPECPREFILL_INSTALL is not set"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def installed(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, from the wheel with pip."""
    return try_install.install(wheel_file, "pip", tmp_path_factory.mktemp("installed"))


@pytest.mark.nightly
def test_the_wheel_with_pip(installed: Path, wheel_file: Path, tmp_path: Path) -> None:
    assert "demo read " in try_install.use(installed, wheel_file, tmp_path)


def test_the_sdist_with_uv(sdist: Path, tmp_path: Path) -> None:
    assert "demo read " in try_install.try_install(sdist, "uv", tmp_path)
