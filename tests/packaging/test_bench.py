"""scripts/bench: the list, the options, and the keys of the JSON that other programs read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from benchmarks import long, lossless
from benchmarks.harness import servers
from benchmarks.harness.command import FOLDER, benchmark, main, parsed

from tests.distributed.ranks import free_ports
from tests.tiny import save_checkpoint

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(file.stem for file in FOLDER.glob("[a-z]*.py"))
DECODE_ROW = "part context n arm tokens_per_step ms_per_token gain cpu_ms_per_token cpu_gain outer inner".split()
TASK_ROW = "part task arm n ms_per_token vs_off low high acceptance tokens_per_step engaged different".split()
AFTER_ROW = "part model context kept rows full_tok_s sparse_tok_s sparse_vs_full low high n".split()
KV_ROW = "part model context prefill rows kv mib step_ms gain low high".split()
SERVING = "alone_tok_s together_tok_s streams gain".split()
LONG = "benchmark device blas mlx pair repeats rest_share_max peak_ratio_max exponents rows".split()
LONG_ROW = """tokens full_ms sparse_ms draft_alone_ms target_kept_ms kept_tokens rest_ms rest_of_full full_peak_mib
sparse_peak_mib peak_ratio hit_ms""".split()
PREFIXES = """benchmark device blas mlx sessions tokens layers repeats find_covers_ms find_ms hit_mib hit_lookup_ms
hit_forward_ms hit_alone_ms hit_over_ms hit_peak_mib store_mib store_ms store_evicting_ms store_evicted evict_us
disk_mib disk_write_s disk_cold disk_file_ms disk_restore_ms disk_restore_cpu_ms disk_share
disk_file_mib_s disk_restore_mib_s""".split()
LOAD = "benchmark device blas mlx limit_s rates sparse_vs_dense dense_vs_mlx_lm rows".split()
LOAD_ROW = "arm rate requests unanswered p50_s p95_s sustained".split()
AGENTS = """benchmark device blas mlx tokens repeats sum_vs_dense sum_vs_mlx_lm worst_vs_dense
second_session_first_vs_warm sparse_share_of_new right rows turns""".split()
AGENTS_ROW = """session arm sum_s worst_s wall_s prompt_tokens cached_tokens target_tokens draft_tokens cache_hits
sparse_turns asked right second_s""".split()
TTFT = """benchmark device blas mlx target draft rule dtype target_step draft_step tokens keep speedup r share_of_limit
limit_of_whole rest_of_full between_of_full between_growth target_weights_mib draft_weights_mib worst_prediction
rows""".split()
TTFT_ROW = """tokens keep kept_tokens full_ttft_ms sparse_ttft_ms draft_ms lookahead_ms select_ms prefill_ms
first_token_ms draft_alone_ms target_kept_ms limit_ms whole_draft_alone_ms whole_limit_ms speedup r
share_of_limit rest_of_full between_ms between_of_full full_peak_mib sparse_peak_mib full_kv_mib
sparse_kv_mib draft_kv_mib scoring_mib full_decode_tps sparse_decode_tps predicted_full_ms
predicted_sparse_ms""".split()


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


def test_an_unknown_name_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ttfft"]) == 2
    assert capsys.readouterr().err == f"error: there is no benchmark 'ttfft': choose from {', '.join(NAMES)}\n"


@pytest.mark.parametrize("name", NAMES)
def test_quick_changes_options_that_exist_and_no_others(name: str) -> None:
    chosen = benchmark(name)
    usual, quick = vars(parsed(name, chosen, [])), vars(parsed(name, chosen, ["--quick"]))
    assert usual.keys() == quick.keys() >= chosen.QUICK.keys()
    assert {key: value for key, value in quick.items() if value != usual[key]} == {"quick": True, **chosen.QUICK}


def test_what_is_given_beside_quick_wins() -> None:
    options = parsed("ttft", benchmark("ttft"), ["--quick", "--repeats", "5"])
    assert (options.repeats, options.keep) == (5, ["0.2"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("constraints --pair nobody", "no pair"),
        ("ttft --draft some/folder", "--draft needs --target"),
        ("serving --pair smollm2", "model.safetensors"),
        ("peers --target models/demo/target", "the draft None is no folder with a model.safetensors"),
        ("ttft --lengths 12", "--lengths"),
    ],
)
def test_what_can_not_be_run_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: str, error: str
) -> None:
    assert main(arguments.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert error in said
    assert said.count("\n") == 1


def test_ttft(report: Report, tmp_path: Path) -> None:
    target, draft = (save_checkpoint(tmp_path / side, "llama", seed) for seed, side in enumerate(("target", "draft")))
    found = report(f"ttft --quick --lengths 64 128 --repeats 1 --target {target} --draft {draft}")
    assert found.keys() == set(TTFT)
    assert [row.keys() for row in found["rows"]] == [set(TTFT_ROW)] * 2
    assert found["benchmark"] == "ttft"


def test_constraints(report: Report) -> None:
    found = report("constraints --quick --rows 2 --blocks 2")
    assert found.keys() == {"target", "blas", "cells"}
    (cell,) = found["cells"]
    assert cell.keys() == {"rows", "free_ms", "guided_ms", "overhead", "cpu_overhead", "mask_us"}


def test_sessions(report: Report) -> None:
    found = report("sessions --quick --sessions 1 --tokens 300")
    assert found.keys() == {"benchmark", "pair", "tokens", "rows"}
    assert {"new, 1 facts", "chat, 12 facts"} <= found["rows"].keys()
    assert all(row.keys() == {"n", "misses", "found", "starts_over", "tokens"} for row in found["rows"].values())


def test_decode(report: Report) -> None:
    found = report("decode --quick --lengths 256 -n 1 --codes 1 --context 512 --tokens 4")
    assert found.keys() == {"bench", "budget", "needle", "shape", "gate", "seconds"}
    assert {row["arm"] for row in found["needle"]} == {
        *("autoregressive", "draft", "retrieval", "triforce", "ngram", "means", "streaming")
    }
    assert all(row.keys() == {*DECODE_ROW, "codes", "right"} for row in found["needle"])
    assert all(row.keys() == {*DECODE_ROW, "noise"} for row in found["shape"])
    times = {f"{arm}_{clock}" for arm in ("off", "auto") for clock in ("ms", "cpu_ms")}
    assert found["gate"].keys() == {"part", "n", "loss", "cpu_loss", "reasons", *times}


def test_decode_of_tasks_and_after_prefills(report: Report) -> None:
    small = "--lengths 256 -n 3 --tokens 6 --rows 1 2 --turns 1 --steps 2 --layers 1 --narrow 16 --budget 64"
    found = report(f"decode --quick --parts tasks after kv {small}")
    ratios = {f"{head}sparse_vs_full_{rows}" for head in ("", "shape_") for rows in (1, 2)}
    parts = {"tasks", "ngram_vs_off", "auto_vs_off", "different", "after", "kv", "kv_kl"}
    assert found.keys() == {"bench", "budget", "seconds", *parts, *ratios}
    assert found["different"] == 0
    assert all(row.keys() == set(TASK_ROW) for row in found["tasks"])
    told = {(row["task"], row["arm"]) for row in found["tasks"]}
    assert told == set(product(("quote", "edit", "free"), ("off", "draft", "ngram", "retrieval", "auto")))
    assert all(row.keys() == set(AFTER_ROW) for row in found["after"])
    assert all(row.keys() == set(KV_ROW) for row in found["kv"])
    sizes = {(row["model"], row["kv"]): row["mib"] for row in found["kv"] if row["prefill"] == "full"}
    for model in ("pair", "shape"):
        assert sizes[model, "none"] > 3 * sizes[model, "8 bits"] > 4 * sizes[model, "4 bits"]
    apart = {(row["prefill"], row["kv"]): row["kl"] for row in found["kv_kl"]}
    assert all(0 <= apart[kind, "8 bits"] < apart[kind, "4 bits"] for kind in ("full", "sparse"))


def test_lossless(report: Report) -> None:
    found = report("lossless --quick -n 1 --length 200 --tokens 8")
    assert found.keys() == {"check", "prompts", "tokens", "identical"}


def test_serving(report: Report) -> None:
    found = report("serving --quick --alone --parts streams --tokens 4 --repeats 1")
    assert found.keys() == {"benchmark", "device", "blas", "mlx", "batch_gain", "rows"}
    assert found["rows"]["mlx-specprefill"]["streams"].keys() == set(SERVING)


def test_long(report: Report) -> None:
    found = report("long --quick --lengths 1024 2048")
    assert found.keys() == set(LONG)
    assert [row.keys() for row in found["rows"]] == [set(LONG_ROW)] * 2
    assert all(row["peak_ratio"] > 0 and row["kept_tokens"] < row["tokens"] / 2 for row in found["rows"])


def test_prefixes(report: Report) -> None:
    found = report("prefixes --quick --tokens 4096 --sessions 2 --layers 2 --repeats 1")
    assert list(found) == PREFIXES
    assert found["store_evicted"] == 4096 / 256
    assert found["hit_mib"] == 2 * 4096 * 2 * 64 * 4 / 2**20


def test_exponents_are_fitted() -> None:
    rows = [{"tokens": n, "linear": 3.0 * n, "square": 0.1 * n * n, "less": -1.0} for n in (1000, 2000, 8000)]
    assert long.exponent(rows, "linear") == pytest.approx(1)
    assert long.exponent(rows, "square") == pytest.approx(2)
    assert long.exponent(rows, "less") is None
    assert long.exponent(rows[:1], "linear") is None


@pytest.mark.nightly
def test_load(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "REST_S", 0.2)
    sent = "--seconds 1 --rate 32 --lengths 40 80 --shared 50 --least 1 --limit-s 1e-6"
    found = report(f"load --quick {sent}")
    assert found.keys() == set(LOAD)
    assert [row.keys() for row in found["rows"]] == [set(LOAD_ROW)] * 8
    assert found["rates"] == {"ours, sparse": None, "ours, full": None}  # no server is that quick
    assert all(row["p95_s"] is None or row["p95_s"] > 0 for row in found["rows"])


@pytest.mark.nightly
def test_agents(report: Report) -> None:
    found = report("agents --quick --alone --tokens 1000 --repeats 1")
    assert found.keys() == set(AGENTS)
    assert [row["arm"] for row in found["rows"]] == ["ours", "ours, full"]
    assert found["rows"][0].keys() == {*AGENTS_ROW, "warm_s"}
    assert all(found[name] > 0 for name in ("sum_vs_dense", "worst_vs_dense", "second_session_first_vs_warm"))
    assert found["sum_vs_mlx_lm"] is None  # it did not take part


def test_wrong_answers_end_with_status_1_and_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lossless, "run", lambda _: {"check": "lossless", "different": 1})
    assert main(["lossless"]) == 1
    assert capsys.readouterr().out == '{"check": "lossless", "different": 1}\n'


@pytest.mark.nightly
def test_what_two_ranks_send_each_other(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sums per layer, of the hidden size, in float32."""
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "scripts"), str(ROOT), str(ROOT / "server")]))
    options = "--shape llama-3.1-8b --layers 1 --narrow 4 --lengths 64 --repeats 1"
    found = report(f"ttft --hosts {hosts} --starting-port {free_ports(4) + 1} {options}")
    assert (found["benchmark"], found["ranks"], found["sharding"]) == ("ranks", 2, "tensor")
    (row,) = found["rows"]
    assert (row["collectives"], row["payload"], row["wire"]) == (2, 2 * 1024 * 4, 2 * 1024 * 4)
    assert row["prefill_share"] < 1
    assert row["token_share"] < 1
