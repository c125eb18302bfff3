"""Findings of the doctor on a healthy machine, and on one where things are wrong."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import mlx_specprefill
from mlx_specprefill import BlasStatus, Check
from mlx_specprefill_server import cli
from mlx_specprefill_server.cli import examination as doctor


@pytest.fixture(autouse=True)
def _healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "BLAS", BlasStatus("loaded", "libfast.so"))
    monkeypatch.setenv("MLX_SPECPREFILL_CALIBRATION_FILE", str(tmp_path / "made" / "costs.json"))


def run(**environment: str) -> Result:
    names = {f"MLX_SPECPREFILL_{name}": value for name, value in environment.items()}
    return CliRunner(env={"COLUMNS": "400", **names}).invoke(cli.app, ["doctor"])


def test_it_names_all_parts(tmp_path: Path) -> None:
    done = run()
    for part in ("mlx-specprefill 0.", "cores", " for weights, requests and caches", "loaded: libfast.so", "mlx 0."):
        assert part in done.stdout
    assert f"{tmp_path / 'made'} (not made yet)" in done.stdout
    assert "demo: ready" in done.stdout
    assert "gpt-oss-120b: from its repository" in done.stdout
    assert done.stdout.endswith("Nothing is wrong.\n")
    assert done.exit_code == 0


def test_wrong_settings_are_named_and_keys_are_not_shown() -> None:
    done = run(PORT="x", PROT="1", API_KEYS="geheim")
    assert done.exit_code == 1
    assert "- the environment variable MLX_SPECPREFILL_PROT is no setting; did you mean MLX_SPEC" in done.stdout
    assert "- MLX_SPECPREFILL_PORT: Input should be a valid integer" in done.stdout
    assert "MLX_SPECPREFILL_API_KEYS=(hidden)" in done.stdout
    assert "geheim" not in done.stdout


def test_a_cache_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(CALIBRATION_FILE=str(tmp_path / "file" / "costs.json"), PORT="x")
    assert f"- {tmp_path / 'file'} can't be written" in done.stdout
    assert "MLX_SPECPREFILL_CALIBRATION_FILE" in done.stdout


def test_a_slow_blas_and_another_version_come_with_the_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BLAS", BlasStatus("missing", None, "Install a fast one"))
    monkeypatch.setattr(doctor, "requires", lambda _: ["mlx-lm==0.1.*", "not-there", 'x; extra == "dev"'])
    done = run()
    assert "- Install a fast one" in done.stdout
    assert "- mlx-lm 0." in done.stdout
    assert "but mlx-lm==0.1.* is needed: " in done.stdout
    assert "- not-there is missing" in done.stdout
    assert "- x" not in done.stdout


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert f"http://127.0.0.1:{port}, where something answers already" in run(PORT=port).stdout
    assert f"http://127.0.0.1:{port}, which is free" in run(PORT=port).stdout


def test_the_machine_is_one() -> None:
    found = mlx_specprefill.machine()
    assert found.device in ("cpu", "gpu")
    assert found.cores >= 1
    assert found.memory is None or found.memory_limit is None or found.memory_limit <= found.memory


# --- on a Mac ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return a function that runs the doctor on a Mac like this, with stand-ins for the system's answers."""

    def run_there(
        release: str = "15.1", made_for: str = "arm64", metal: bool = True, wired: str = "0", slow: int = 0
    ) -> Result:
        said = {"mac_ver": (release, ("", "", ""), made_for), "machine": made_for}
        for name, value in said.items():
            monkeypatch.setattr(platform, name, lambda value=value: value)
        here = replace(mlx_specprefill.machine(), device="gpu" if metal else "cpu", has_metal=metal)
        monkeypatch.setattr(doctor, "machine", lambda: here)
        monkeypatch.setattr(sys, "platform", "darwin")
        said_by = {"/usr/sbin/sysctl": f"{wired}\n", "/usr/bin/pmset": f" sleep 1\n lowpowermode         {slow}\n"}
        monkeypatch.setattr(
            subprocess, "run", lambda asked, **_: subprocess.CompletedProcess(asked, 0, said_by[asked[0]])
        )
        return run()

    return run_there


def test_a_mac_that_is_as_it_should_be(mac: Callable[..., Result]) -> None:
    done = mac(wired="98304")
    assert "gpu: " in done.stdout
    assert "; macOS 15.1, arm64" in done.stdout
    assert "; iogpu.wired_limit_mb 98304\n" in "\n".join(line.rstrip() for line in done.stdout.splitlines())
    assert done.exit_code == 0


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"release": "13.7"}, "- MLX needs macOS 14 or newer, this is 13.7"),
        ({"made_for": "x86_64"}, "- this Python is made for Intel processors"),
        ({"metal": False}, "- MLX found no Metal device"),
        ({"slow": 1}, "- Low Power Mode is on"),
    ],
)
def test_what_a_mac_lacks(mac: Callable[..., Result], given: dict[str, Any], problem: str) -> None:
    done = mac(**given)
    assert problem in done.stdout
    assert done.exit_code == 1


def test_the_default_wired_limit_is_called_that(mac: Callable[..., Result]) -> None:
    assert "iogpu.wired_limit_mb 0 (the default of macOS)" in mac().stdout


# --- what this device computes ----------------------------------------------------------------------------------------

GOOD = Check("llama", "bfloat16", "sparse prefill", "ok", 0.0041, 0.025)
FAR = Check("llama", "float32", "sparse prefill", "failed", 0.3, 1e-5)
RAISED = Check("qwen3", "float16", "drafted by ngram", "failed", words="RuntimeError: [METAL] no")
MISSING = Check("gpt_oss", "float16", "all", "not supported", words="float32 only")


def computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *found: Check) -> tuple[Result, dict[str, Any]]:
    monkeypatch.setattr(doctor, "check_device", lambda: iter(found))
    file = tmp_path / "doctor.json"
    done = CliRunner(env={"COLUMNS": "400"}).invoke(cli.app, ["doctor", "--compute", "--json", str(file)])
    return done, json.loads(file.read_text())


def test_a_device_that_computes_what_it_should(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done, record = computed(monkeypatch, tmp_path, GOOD, replace(GOOD, model="qwen3", error=0.002), MISSING)
    assert "ok     llama                bfloat16  sparse prefill                4.1e-03\n" in done.stdout
    assert "not supported here: float32 only\n" in done.stdout
    assert "\nAll 2 checks pass. Not supported here: gpt_oss in float16.\nA synchronisation takes 0." in done.stdout
    assert done.exit_code == 0
    assert record["checks"] == {
        "passed": 2,
        "failed": [],
        "not supported": [{"model": "gpt_oss", "dtype": "float16", "operation": "all", "words": "float32 only"}],
        "largest errors": {"sparse prefill": {"bfloat16": 0.0041}},
    }
    assert record["machine"]["cores"] >= 1
    assert record["sync_ms"] > 0


def test_a_device_that_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done, record = computed(monkeypatch, tmp_path, GOOD, FAR, RAISED)
    assert "FAILED llama                float32   sparse prefill                3.0e-01, limit 1e-05\n" in done.stdout
    assert "RuntimeError: [METAL] no\n" in done.stdout
    assert "\nFAILED: 2 of 3 checks.\n" in done.stdout
    assert done.exit_code == 1
    assert [check["model"] for check in record["checks"]["failed"]] == ["llama", "qwen3"]
