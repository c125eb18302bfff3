"""Models are loaded over two processes, which wait for each other in every check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .ranks import logs, started
from .worker import LOADED_NAMES

LIMIT_S = 60


@pytest.mark.timeout(3 * LIMIT_S)
def test_no_rank_waits_for_one_that_refuses(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with started(tmp_path, "-m", "tests.distributed.worker", "refused", str(out)) as processes:
        for process in processes:
            process.wait(LIMIT_S)
    assert out.is_file(), logs(tmp_path)
    refusals = json.loads(out.read_text())
    assert refusals == dict.fromkeys(LOADED_NAMES) | {"differs": "another machine refuses it; its log says why"}
