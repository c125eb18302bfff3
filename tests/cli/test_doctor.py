"""What the doctor says of a healthy machine, and of one where things are wrong."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import mlx_specprefill
from mlx_specprefill import BlasStatus
from mlx_specprefill_server import cli
from mlx_specprefill_server.cli import examining


@pytest.fixture(autouse=True)
def _healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(examining, "BLAS", BlasStatus("loaded", "libfast.so"))
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
    assert '- MLX_SPECPREFILL_PORT: "x" is not a whole number' in done.stdout
    assert "MLX_SPECPREFILL_API_KEYS=(hidden)" in done.stdout
    assert "geheim" not in done.stdout


def test_a_cache_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(CALIBRATION_FILE=str(tmp_path / "file" / "costs.json"), PORT="x")
    assert f"- {tmp_path / 'file'} can't be written" in done.stdout
    assert "MLX_SPECPREFILL_CALIBRATION_FILE" in done.stdout


def test_a_slow_blas_and_another_version_come_with_the_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "BLAS", BlasStatus("missing", None, "Install a fast one"))
    monkeypatch.setattr(examining, "requires", lambda _: ["mlx-lm==0.1.*", "not-there", 'x; extra == "dev"'])
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
