"""The code that a warm plain chat meets, from the request to the last token: lines of ours that run are limited.

And how deep it is: our frames on the stack when the target's or the draft's attention runs are limited. Files and
functions are printed, not judged. What the product's text looks like is measured beside it: long functions, and
assignments of modules behind their first class or function.
"""

from __future__ import annotations

import ast
import math
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import dropwhile
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from fastapi.testclient import TestClient

import mlx_specprefill
import mlx_specprefill_server
from mlx_specprefill import Engine
from mlx_specprefill.engine.thread import loop
from mlx_specprefill_server.pair_loading import load
from mlx_specprefill_server.pairs import find_pair
from mlx_specprefill_server.settings.pair import make_settings
from tests.support.application import app_over

MOST_LINES = 2755  # of a warm plain sparse chat
MOST_FRAMES = 11
LONGEST = 60  # lines of a function
P90 = 16
MOST_LATE = 30  # assignments of modules behind their first class or function
LIBRARY, SERVER = (Path(str(package.__file__)).parent for package in (mlx_specprefill, mlx_specprefill_server))
LOG = "\n".join(f"On day {day} the ship sailed {day * 7 % 50} miles and met nobody." for day in range(60))


class Tracer:
    """Notes our functions and lines that run in any thread, while it is on.

    Attributes:
        functions: file and name of each.
        lines: file and number of each.
        frames: our functions above the attention of "target" and "draft", innermost first.
    """

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.lines: set[tuple[str, int]] = set()
        self.frames: dict[str, list[str]] = {"target": [], "draft": []}
        self.is_on = False
        self._ours = cache(lambda name: any(package in Path(name).parents for package in (LIBRARY, SERVER)))

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not self._ours(name):
            return None
        if self.is_on and event == "call":
            self.functions.add((name, frame.f_code.co_qualname))
            if frame.f_code.co_name == "attend" and Path(name) == LIBRARY / "adapters" / "capture.py":
                self._note_frames(frame.f_back)
        elif self.is_on and event == "line":
            self.lines.add((name, frame.f_lineno))
        return self

    def _note_frames(self, frame: FrameType | None) -> None:
        frames = []
        while frame is not None:
            if LIBRARY in (file := Path(frame.f_code.co_filename)).parents:
                frames.append(f"{file.relative_to(LIBRARY)}: {frame.f_code.co_name}")
            frame = frame.f_back
        if "engine/reading/prefill.py: run" in frames:
            model = "draft" if any(frame.startswith("selection/scorer.py") for frame in frames) else "target"
            self.frames[model] = max(self.frames[model], frames, key=len)


def traced(run: Callable[[Tracer], None]) -> Tracer:
    """Return the tracer after a run that turns it on and off."""
    tracer, before = Tracer(), sys.gettrace()
    threading.settrace(tracer)
    sys.settrace(tracer)
    try:
        run(tracer)
    finally:
        sys.settrace(before)
        threading.settrace(None)
    return tracer


def test_a_plain_sparse_chat_runs_few_lines_and_nothing_of_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = find_pair("demo")
    settings = make_settings(pair, calibration_file=None, densify="off")  # idle work would be traced, too
    monkeypatch.setattr(loop, "_LOOK_EVERY_S", math.inf)  # after the first look at the memory, a matter of time

    def chat(tracer: Tracer) -> None:
        with (
            Engine(load(pair, "auto", settings), settings.engine_config()) as engine,
            TestClient(app_over(engine, settings), base_url="http://localhost") as client,
        ):
            assert '"sparse"' in ask(client, "What happened on day 3?")
            tracer.is_on = True
            assert '"sparse"' in ask(client, "How far did the ship sail on day 7?")
            tracer.is_on = False

    tracer = traced(chat)
    files = {file for file, _ in tracer.functions}
    print(f"{len(files)} files, {len(tracer.functions)} functions, {len(tracer.lines)} lines")
    assert str(LIBRARY / "engine" / "thread" / "loop.py") in files
    assert not [file for file in files if "distributed" in file or "ranked" in file]
    assert 1000 < len(tracer.lines) <= MOST_LINES
    for frames in tracer.frames.values():
        assert 0 < len(frames) <= MOST_FRAMES, "\n".join(frames)


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def modules() -> Iterator[ast.Module]:
    for package in (LIBRARY, SERVER):
        for file in package.rglob("*.py"):
            yield ast.parse(file.read_text(encoding="utf-8"))


def test_functions_are_short() -> None:
    sizes = sorted(
        node.end_lineno - node.lineno + 1
        for module in modules()
        for node in ast.walk(module)
        if isinstance(node, DEFINITIONS[:2]) and node.end_lineno is not None
    )
    assert sizes[len(sizes) * 9 // 10] <= P90
    assert [size for size in sizes if size > LONGEST] == []


def test_constants_stand_above_what_uses_them() -> None:
    """An assignment that needs a class or function of its own module can't."""
    late = 0
    for module in modules():
        body = list(dropwhile(lambda node: not isinstance(node, DEFINITIONS), module.body))
        late += sum(isinstance(node, (ast.Assign, ast.AnnAssign)) for node in body)
    print(f"{late} assignments behind a first definition")
    assert late <= MOST_LATE


def ask(client: TestClient, question: str) -> str:
    """Return the stream of a sparse chat."""
    message = {"role": "user", "content": f"{LOG}\n\n{question}"}
    body = {"messages": [message], "stream": True, "specprefill": True, "max_tokens": 8}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        return "".join(answer.iter_text())
