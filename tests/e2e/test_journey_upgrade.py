"""A cache folder of an older version: it is not read, and the server serves."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.serving import Server, start

from .conftest import PAIR, haystack
from .test_start import KNOWN

BODY = {"messages": [{"role": "user", "content": haystack("Anna", "471128", 700, 0.2, seed=3)}], "max_tokens": 16}


def ask(server: Server) -> tuple[str, int]:
    answer = httpx.post(f"{server.base}/v1/chat/completions", json=BODY | {"specprefill": False}, timeout=120).json()
    return answer["choices"][0]["message"]["content"], answer["specprefill"]["cached_tokens"]


@pytest.mark.extended
def test_what_an_older_version_left_is_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    options = (*KNOWN, "--prefix-cache-dir", str(folder))
    with start(tmp_path / "log", *PAIR, *options) as server:
        before, _ = ask(server)
    with start(tmp_path / "log2", *PAIR, *options) as server:
        assert ask(server)[1] > 500, "the folder is read by the version that wrote it"
    (folder / "index.sqlite").write_bytes(b"SQLite format 3")  # by it a former folder is known
    with start(tmp_path / "log3", *PAIR, *options) as server:
        assert ask(server) == (before, 0)
    log = (tmp_path / "log3").read_text()
    assert "former version" in log
    assert "Traceback" not in log
