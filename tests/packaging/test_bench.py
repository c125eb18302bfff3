"""scripts/bench: the list, the options, and the keys of the JSON that other programs read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks import decode, peers
from benchmarks.harness import UnequalWorkError, check_alike
from benchmarks.harness.command import FOLDER, benchmark, main, parsed
from benchmarks.harness.servers import Server

from tests.support.tiny import save_checkpoint

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(file.stem for file in FOLDER.glob("[a-z]*.py"))
DECODE_ROW = """prefill task arm n ms_per_token vs_off low high mean cpu_vs_off cost_vs_off cost_mean acceptance
engaged different""".split()
LONG = """benchmark device blas mlx shape layers draft_layers narrow dtype quantised repeats rest_share_max
peak_ratio_max exponents rows""".split()
LONG_ROW = """tokens full_ms sparse_ms draft_alone_ms target_kept_ms kept_tokens rest_ms rest_of_full full_peak_mib
sparse_peak_mib peak_ratio hit_ms""".split()
AGENTS = "benchmark device blas mlx tokens repeats rows bars edits wrong turns".split()
AGENTS_ROW = """session arm sum_s worst_s target draft recalled restarts second_draft second_new asked right reused
last_s last_target retry_s retry_target restarted_s restarted_target""".split()
TTFT = """benchmark device blas mlx target draft rule dtype step tokens keep speedup r share_of_limit rest_of_full
rows""".split()
TTFT_ROW = """tokens keep kept_tokens full_ttft_ms sparse_ttft_ms draft_ms select_ms prefill_ms first_token_ms
draft_alone_ms target_kept_ms limit_ms speedup r share_of_limit rest_of_full full_decode_tps
sparse_decode_tps""".split()


Report = Callable[[str], dict[str, Any]]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """The last line of a benchmark's output, as JSON that others can read: without NaN."""

    def run(arguments: str) -> dict[str, Any]:
        assert main(arguments.split()) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
        return found

    return run


def test_every_benchmark_is_listed_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name, by the program itself in a process of its own; and with --help."""
    path = os.pathsep.join([str(ROOT / "scripts"), str(ROOT), str(ROOT / "server")])
    command = [sys.executable, "-P", "-m", "benchmarks"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [name for name, _ in lines] == NAMES
    assert all(line.endswith(".") for _, line in lines)
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_quick_changes_options_that_exist_and_no_others(name: str) -> None:
    chosen = benchmark(name)
    usual, quick = vars(parsed(name, chosen, [])), vars(parsed(name, chosen, ["--quick"]))
    assert usual.keys() == quick.keys() >= chosen.QUICK.keys()
    assert {key: value for key, value in quick.items() if value != usual[key]} == {"quick": True, **chosen.QUICK}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("decode --pair nobody", "no pair"),
        ("ttft --draft some/folder", "--draft needs --target"),
        ("decode --arms mtp", "mtp: "),
        ("agents --target models/pairs.toml --draft models/demo/draft", "the target models/pairs.toml is no folder"),
        ("peers --target models/demo/target", "the draft None is no folder with a model.safetensors"),
        ("ttft --lengths 12", "--lengths"),
    ],
)
def test_what_can_not_be_run_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: str, error: str
) -> None:
    assert main(arguments.split()) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Loading ")]  # if long
    assert said[0].startswith("error: ")
    assert error in said[0]
    assert len(said) == 1


def test_ttft(report: Report, tmp_path: Path) -> None:
    target, draft = (save_checkpoint(tmp_path / side, "llama", seed) for seed, side in enumerate(("target", "draft")))
    found = report(f"ttft --quick --lengths 64 128 --repeats 1 --target {target} --draft {draft}")
    assert found.keys() == set(TTFT)
    assert [row.keys() for row in found["rows"]] == [set(TTFT_ROW)] * 2
    assert found["benchmark"] == "ttft"
    counts = report(f"ttft --counts --target {target} --draft {draft}")["counts"]
    assert {(row["step"], row["waits"]) for row in counts} >= {("draft", 1), ("prefill", 1), ("decode", 1)}


@pytest.mark.nightly
def test_decode(report: Report) -> None:
    found = report("decode --quick")
    arms = ["ngram", "draft", "triforce"]
    assert found.keys() == {"benchmark", "different", "rows", *(f"{arm}_vs_off" for arm in arms)}
    assert found["different"] == 0
    assert all(row.keys() == set(DECODE_ROW) for row in found["rows"])
    told = {(row["prefill"], row["task"], row["arm"]) for row in found["rows"]}
    tasks = ("quote", "edit", "code", "chat", "free", "all")
    assert told == set(product(("full", "sparse"), tasks, ("off", *arms)))
    assert all(row["cost_vs_off"] == 1 for row in found["rows"] if row["arm"] == "off")


def test_long(report: Report) -> None:
    found = report("long --quick --lengths 1024 2048")
    assert found.keys() == set(LONG)
    assert [row.keys() for row in found["rows"]] == [set(LONG_ROW)] * 2
    assert all(row["peak_ratio"] > 0 and row["kept_tokens"] < row["tokens"] / 2 for row in found["rows"])


@pytest.mark.nightly
def test_deferred_tools_leave_a_quarter_of_the_first_prompt(report: Report) -> None:
    found = report("agents --tools 100 --tokens 7000 --target models/demo/target --draft models/demo/draft")
    prompts = {row["tools"]: row["prompt"] for row in found["rows"]}
    assert found["deferred_vs_in_front"] == pytest.approx(prompts["deferred"] / prompts["in front"], abs=1e-3)
    assert found["deferred_vs_in_front"] <= 0.25
    assert 250 <= found["tokens_a_schema"] <= 350
    assert prompts["deferred"] < prompts["one loaded"] == prompts["that one alone"] < prompts["in front"]


@pytest.mark.nightly
def test_agents(report: Report) -> None:
    found = report("agents --quick --alone --tokens 1000")
    assert found.keys() == set(AGENTS)
    assert [row["arm"] for row in found["rows"]] == ["ours", "ours, full"]
    assert all(row.keys() == set(AGENTS_ROW) and row["asked"] > 10 for row in found["rows"])
    (bars,) = found["bars"]
    assert all(bars[name] > 0 for name in ("target_vs_full", "sum_vs_full", "retry_vs_first", "restarted_vs_first"))
    assert bars["sum_vs_mlx_lm"] is None  # it did not take part


def test_wrong_answers_end_with_status_1_and_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "run", lambda _: {"benchmark": "decode", "different": 1})
    assert main(["decode"]) == 1
    assert capsys.readouterr().out == '{"benchmark": "decode", "different": 1}\n'


@pytest.mark.parametrize(("written", "exact", "fails"), [(8, True, False), (5, True, True), (5, False, False)])
def test_an_answer_of_another_length_fails_where_lengths_are_compared(written: int, exact: bool, fails: bool) -> None:
    """Whatever a part does with other errors: `attempt` of peers lets an arm drop out for them."""
    chunk = {"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": written, "prompt_tokens": 3}}
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    client = httpx.Client(transport=httpx.MockTransport(answer))
    server = Server("ours", "http://here", client, 0, Path("log"), exact=exact)
    bench = peers.Bench([peers.Arm(peers.Figures("ours"), server, {})], Any, peers.Figures("loop"), Any)
    with pytest.raises(UnequalWorkError, match="5 tokens instead of 8") if fails else nullcontext():
        bench.attempt("streams", lambda arm: arm.ask("hello", 8))
    assert asked[0].get("ignore_eos", False) is exact
    assert not bench.arms[0].figures.failures


def test_arms_that_read_another_number_of_tokens_are_not_compared() -> None:
    check_alike("prompt tokens", {"ours": 1000, "theirs": 1015}, 0.02)
    with pytest.raises(UnequalWorkError, match="prompt tokens differ"):
        check_alike("prompt tokens", {"ours": 1000, "theirs": 1030}, 0.02)
