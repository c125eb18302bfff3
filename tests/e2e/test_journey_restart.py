"""The server ends in the middle of a stream."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.support.serving import start

from .conftest import PAIR

HI: Any = [{"role": "user", "content": "Hello"}]
LONG = {"ignore_eos": True, "max_tokens": 4000}


@pytest.mark.extended
@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)])
def test_a_signal_ends_streams_properly(tmp_path: Path, signals: tuple[signal.Signals, ...]) -> None:
    with start(tmp_path / "log", *PAIR) as server:
        body = {"messages": HI, "stream": True, **LONG}
        with httpx.stream("POST", f"{server.base}/v1/chat/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            for kind in signals:
                server.process.send_signal(kind)
                time.sleep(0.5)  # two at once are one
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        last = orjson.loads(rest[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["engine_error"]["code"] == "engine_unavailable"
        server.process.wait(60)
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert ("SIGTERM: ending; 1 running requests have 30 s to finish" in log) == (signal.SIGTERM in signals)
    assert log.endswith("the server has ended\n")
