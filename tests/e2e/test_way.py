"""The code that a plain chat meets: files of ours with a function that ran, from the request to the last token."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from fastapi.testclient import TestClient

import mlx_specprefill
import mlx_specprefill_server
from mlx_specprefill import Engine
from mlx_specprefill_server.app import create_app
from mlx_specprefill_server.pair_loading import load, make_settings
from mlx_specprefill_server.pairs import find_pair

MOST_FILES = 58
LIBRARY, SERVER = (Path(str(package.__file__)).parent for package in (mlx_specprefill, mlx_specprefill_server))
LOG = "\n".join(f"On day {day} the ship sailed {day * 7 % 50} miles and met nobody." for day in range(60))


class Tracer:
    """Notes the files of our functions that are called in any thread, while it is on."""

    def __init__(self) -> None:
        self.files: set[Path] = set()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if self.is_on and (LIBRARY in file.parents or SERVER in file.parents):
            self.files.add(file)


def traced(run: Callable[[Tracer], None]) -> set[Path]:
    """Return the files that ran while the tracer was on."""
    tracer, before = Tracer(), sys.gettrace()
    threading.settrace(tracer)  # type: ignore[arg-type]
    sys.settrace(tracer)  # type: ignore[arg-type]
    try:
        run(tracer)
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]
    return tracer.files


def test_a_plain_sparse_chat_meets_few_files_and_nothing_of_several_processes() -> None:
    pair = find_pair("demo")
    settings = make_settings(pair, calibration_file=None)

    def chat(tracer: Tracer) -> None:
        with (
            Engine(load(pair, "auto", settings), settings.engine_config()) as engine,
            TestClient(create_app(engine, settings), base_url="http://localhost") as client,
        ):
            assert '"sparse"' in ask(client, "What happened on day 3?")
            tracer.is_on = True
            assert '"sparse"' in ask(client, "How far did the ship sail on day 7?")
            tracer.is_on = False

    files = traced(chat)
    names = sorted(file.as_posix().rpartition("/mlx_specprefill")[2] for file in files)
    assert LIBRARY / "engine" / "loop.py" in files
    assert not [name for name in names if "distributed" in name or "ranked" in name]
    assert len(files) <= MOST_FILES, "\n".join(names)


def ask(client: TestClient, question: str) -> str:
    """Return the stream of a sparse chat."""
    message = {"role": "user", "content": f"{LOG}\n\n{question}"}
    body = {"messages": [message], "stream": True, "specprefill": True, "max_tokens": 8}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        return "".join(answer.iter_text())
