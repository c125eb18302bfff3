"""Run a real agent offline and record its requests, one JSON line per request.

    scripts/record_agent codex                                      the agent's own tool loop on a scripted model
    scripts/record_agent pi --turns 25                              a long one, with what of each prompt was cached
    scripts/record_agent opencode --url http://127.0.0.1:8000 --prompt "What does src/app.py do?" --work ~/src

The agent gets a home of its own, is launched for the recording proxy or has the configuration that `mlx-specprefill
connect` prints for it, and can reach nothing else. Agents are those of the tests (tests/clients);
MLX_SPECPREFILL_TEST_AGENTS=1 installs one that is missing. What agents say is other people's text: recordings stay on
your machine (runs/ is ignored by git).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "server")]

from tests.clients.packages import PACKAGES  # noqa: E402
from tests.support.scripted import long_task, save_scripted, scripts_in  # noqa: E402
from tests.support.serving import start  # noqa: E402

from .proxy import Recorder, running  # noqa: E402

BEGIN = 64  # tokens that new prompts have in common: the template's
KEY = "recorded"  # of the scripted server; clients that insist on a key send it


def main() -> int:
    options = parsed(sys.argv[1:])
    package, out = PACKAGES[options.agent], options.out or ROOT / "runs" / "agents" / f"{options.agent}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    script = "long" if options.turns else package.script
    prompt = options.prompt or f"Please do script:{script} now."
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        home, work = Path(name, "home"), options.work or Path(name, "work")
        for folder in (home, work):
            folder.mkdir(exist_ok=True)
        url, key = stack.enter_context(server(options, Path(name), work))
        recorder = Recorder(out, [key])
        with running(url, recorder) as address:
            connected = ("--url", address, *(("--api-key", key) if key else ()))
            done = package.ended(home, work, prompt, *connected, patience=options.patience)
        if options.turns:
            print(json.dumps({"agent": options.agent, "version": package.version} | session(url, key)))
    sys.stderr.write(done.stdout + done.stderr)
    requests = out.read_text(encoding="utf-8").count("\n") if out.exists() else 0
    print(f"{out}: {requests} requests; {options.agent} ended with status {done.returncode}")
    return done.returncode


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/record_agent", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("agent", choices=list(PACKAGES))
    parser.add_argument("--url", help="a running server without a key, instead of a scripted model")
    parser.add_argument("--prompt", help="what it is asked, with --url")
    parser.add_argument("--work", type=Path, help="the folder in which it works, instead of an empty one")
    parser.add_argument("--turns", type=int, default=0, help="of a long task on the scripted model")
    parser.add_argument("--out", type=Path, help="instead of runs/agents/AGENT.jsonl; replaced if it is there")
    parser.add_argument("--patience", type=float, default=1800.0, help="seconds until the agent is ended")
    options = parser.parse_args(arguments)
    if (options.url is None) != (options.prompt is None):
        parser.error("--url and --prompt go together: the scripted model recites one task only")
    return options


@contextmanager
def server(options: argparse.Namespace, folder: Path, work: Path) -> Iterator[tuple[str, str]]:
    """Yield the address and key of the running server, or of a scripted model until the block ends."""
    if options.url is not None:
        yield options.url, ""
        return
    more = {"long": long_task(options.agent, options.turns)} if options.turns else {}
    model = save_scripted(folder / "model", scripts=scripts_in(work) | more)
    with start(folder / "log", model, None, "--model-alias", "scripted", "--api-key", KEY) as running_server:
        yield running_server.base, KEY


def session(url: str, key: str) -> dict[str, Any]:
    """Return what of the prompts' tokens was cached, and what was read again although it had been cached.

    `worst` and `median` are the shares of a prompt that were read, but for new prompts: a session's first one, a title.
    """
    answer = httpx.get(f"{url}/v1/specprefill/stats", headers={"authorization": f"Bearer {key}"}, timeout=60)
    reports = [entry["specprefill"] for entry in reversed(answer.json()["recent"]) if entry["specprefill"]]
    sizes = [report["prompt_tokens"] for report in reports]
    cached = [report["cached_tokens"] for report in reports]
    read = sorted(1 - part / size for part, size in zip(cached, sizes, strict=True) if part > BEGIN)
    again = sum(report.get("cache", {"miss": {"read_tokens": 0}})["miss"]["read_tokens"] for report in reports)
    return {
        "requests": len(reports),
        "last_prompt": max(sizes),
        "cached": round(sum(cached) / sum(sizes), 3),
        "first_21": round(sum(cached[:21]) / sum(sizes[:21]), 3),
        "read_again": again,
        "left_out": sum(report["prompt_tokens"] - report["kept_tokens"] for report in reports),
        "median": round(median(read), 3),
        "worst": round(read[-1], 3),
    }


try:
    sys.exit(main())
except pytest.skip.Exception as skipped:  # what the tests say of an agent that is not installed
    sys.exit(f"error: {skipped}")
