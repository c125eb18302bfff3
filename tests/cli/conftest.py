"""Commands see none of the variables that steer the test suite, and nothing that other servers have learnt."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _a_new_user(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    for name in [name for name in os.environ if name.startswith("MLX_SPECPREFILL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLX_SPECPREFILL_PORT", "0")  # the default one may be a running server's
