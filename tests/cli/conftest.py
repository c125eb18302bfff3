"""Commands see none of the variables that steer the test suite."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_variables_of_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLX_SPECPREFILL_")]:
        monkeypatch.delenv(name)
