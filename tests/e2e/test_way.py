"""The code that a warm plain chat meets, from the request to the last token: files and functions of ours are printed.

And how deep it is: our frames on the stack when the target's attention runs in a sparse prefill are limited.
"""

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

MOST_FRAMES = 10
LIBRARY, SERVER = (Path(str(package.__file__)).parent for package in (mlx_specprefill, mlx_specprefill_server))
LOG = "\n".join(f"On day {day} the ship sailed {day * 7 % 50} miles and met nobody." for day in range(60))


class Tracer:
    """Notes our functions that are called in any thread, while it is on.

    Attributes:
        functions: file and name of each.
        frames: our functions above the target's attention, innermost first.
    """

    def __init__(self) -> None:
        self.functions: set[tuple[Path, str]] = set()
        self.frames: list[str] = []
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if self.is_on and (LIBRARY in file.parents or SERVER in file.parents):
            self.functions.add((file, frame.f_code.co_qualname))
            if file == LIBRARY / "adapters" / "capture.py" and frame.f_code.co_name == "attend":
                self._note_frames(frame.f_back)

    def _note_frames(self, frame: FrameType | None) -> None:
        frames = []
        while frame is not None:
            if LIBRARY in (file := Path(frame.f_code.co_filename)).parents:
                frames.append(f"{file.relative_to(LIBRARY)}: {frame.f_code.co_name}")
            frame = frame.f_back
        if "engine/prefill.py: run" in frames and "specprefill/sparse_prefill.py: prefill" in frames:
            self.frames = max(self.frames, frames, key=len)


def traced(run: Callable[[Tracer], None]) -> Tracer:
    """Return the tracer after a run that turns it on and off."""
    tracer, before = Tracer(), sys.gettrace()
    threading.settrace(tracer)  # type: ignore[arg-type]
    sys.settrace(tracer)  # type: ignore[arg-type]
    try:
        run(tracer)
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]
    return tracer


def test_a_plain_sparse_chat_meets_few_files_and_nothing_of_several_processes() -> None:
    pair = find_pair("demo")
    settings = make_settings(pair, calibration_file=None, densify="off")  # idle work would be traced, too

    def chat(tracer: Tracer) -> None:
        with (
            Engine(load(pair, "auto", settings), settings.engine_config()) as engine,
            TestClient(create_app(engine, settings), base_url="http://localhost") as client,
        ):
            assert '"sparse"' in ask(client, "What happened on day 3?")
            tracer.is_on = True
            assert '"sparse"' in ask(client, "How far did the ship sail on day 7?")
            tracer.is_on = False

    tracer = traced(chat)
    files = {file for file, _ in tracer.functions}
    print(f"{len(files)} files, {len(tracer.functions)} functions")
    names = sorted(file.as_posix().rpartition("/mlx_specprefill")[2] for file in files)
    assert LIBRARY / "engine" / "loop.py" in files
    assert not [name for name in names if "distributed" in name or "ranked" in name]
    assert 0 < len(tracer.frames) <= MOST_FRAMES, "\n".join(tracer.frames)


def ask(client: TestClient, question: str) -> str:
    """Return the stream of a sparse chat."""
    message = {"role": "user", "content": f"{LOG}\n\n{question}"}
    body = {"messages": [message], "stream": True, "specprefill": True, "max_tokens": 8}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        return "".join(answer.iter_text())
