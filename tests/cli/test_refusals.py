"""Mistakes on the command line are answered before anything slow is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HEAVY = ("mlx.core", "mlx_lm", "transformers")
CASES = {
    "serve --pair demo --target X": "--pair and --target exclude each other",
    "serve --target x": "x: there is no such folder or file",
    "serve --target ./x": "./x: there is no such folder or file",
    "serve --target org/x": "org/x is not on this machine, and HF_HUB_OFFLINE is set: unset it",
    "serve --target demo/target --draft org/x": "org/x is not on this machine",
    "serve --pair nowhere": "no pair 'nowhere'",
    "serve --draft x": "--draft needs --target",
    "serve --config m.toml --pair demo": "--config and --pair exclude each other",
    "serve --pair demo --keep-pct 7": "--keep-pct: ",
    "bench --pair demo --keep-pct 7": "--keep-pct: ",
    "serve --pair demo --port 99999999": "port",
    "serve --config nowhere.toml": "can't read nowhere.toml",
    "connect codex --url http://127.0.0.1:9": "start the server first",
    "inspect --misses --url http://127.0.0.1:9": "start the server first",
    "inspect": "--prompt-file or --misses is needed",
    "inspect --prompt-file nowhere.txt": "nowhere.txt: No such file",
    "inspect --prompt-file prompt.txt --target x": "x: there is no such folder or file",
    "bench --pair nowhere": "no pair 'nowhere'",
    "bench --target org/x": "org/x is not on this machine",
    "doctor --json x": "--json belongs to --compute",
    "pull nowhere": "no pair 'nowhere'",
    "eval --url http://localhost --task nonsense": "no task 'nonsense'",
    "eval --length 0": "Invalid value for '--length'",
    "eval --pair nowhere": "no pair 'nowhere'",
}
RUN = """
import json, sys
from typer.testing import CliRunner
from mlx_specprefill_server.cli import app
for line in sys.stdin:
    done = CliRunner().invoke(app, line.split())
    found = [name for name in json.loads(sys.argv[1]) if name in sys.modules]
    print(json.dumps([done.exit_code, done.output, found]), flush=True)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, list[str]]]:
    """Return the status, the output and the slow modules of each command, all in one process."""
    folder = tmp_path_factory.mktemp("empty")
    (folder / "prompt.txt").write_text("Hello")
    (folder / "demo" / "target").mkdir(parents=True)
    set_here = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder / "hub"), "XDG_CONFIG_HOME": str(folder)}
    ran = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(HEAVY)],
        input="\n".join(CASES),
        env={**os.environ, **set_here},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return dict(zip(CASES, map(json.loads, ran.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("command", CASES)
def test_a_refusal_imports_nothing_slow(results: dict[str, tuple[int, str, list[str]]], command: str) -> None:
    status, output, imported = results[command]
    assert CASES[command] in " ".join(output.split())
    assert status == 2
    assert imported == []
