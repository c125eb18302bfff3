"""`mlx-specprefill bench` on the bundled pair: what is measured, what is written, what is refused."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_machines
import pytest
from typer.testing import CliRunner, Result

from mlx_specprefill import SparseUnsupportedError
from mlx_specprefill_server import cli
from mlx_specprefill_server.cli import measuring
from mlx_specprefill_server.cli.measuring import fitting_lengths

pytestmark = pytest.mark.extended


def bench(*options: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["bench", "--pair", "demo", *options])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_SPECPREFILL_CALIBRATION_FILE", str(folder / "costs.json"))
        patch.setattr(measuring, "load_average", lambda: 0.0)
        options = ["--length", "600", "--length", "300", "--repeats", "2", "--keep-pct", "0.25"]
        files = ["--out", str(folder / "o.json"), "--submit", str(folder / "sent")]
        return bench(*options, *files), folder


def test_the_table(done: tuple[Result, Path]) -> None:
    result, _ = done
    assert result.exit_code == 0, result.output
    assert "demo on " in result.stdout
    assert "keep 0.25" in result.stdout
    assert "sparse s" in result.stdout


def test_the_record(done: tuple[Result, Path]) -> None:
    measured: dict[str, Any] = json.loads((done[1] / "o.json").read_text())
    assert [row["tokens"] for row in measured["rows"]] == [300, 600]
    assert (measured["keep"], measured["repeats"], measured["pair"]["name"]) == (0.25, 2, "demo")
    for row in measured["rows"]:
        assert len(row["full_runs_s"]) == len(row["sparse_runs_s"]) == 2
        assert row["full_s"] == pytest.approx(sum(row["full_runs_s"]) / 2, abs=1e-4)
        assert row["speedup"] == pytest.approx(row["full_s"] / row["sparse_s"], abs=0.02)
        assert row["tokens"] // 5 < row["kept_tokens"] < row["tokens"] // 2
        assert 0 < row["draft_s"] + row["select_s"] + row["prefill_s"] <= 2 * row["sparse_s"] + 0.01


def test_what_is_sent_in_tells_nothing_about_its_owner(done: tuple[Result, Path]) -> None:
    [file] = (done[1] / "sent").iterdir()
    text = file.read_text()
    assert file.name.endswith("--demo.json")
    assert str(Path.home()) not in text
    assert str(done[1]) not in text
    assert not platform.node() or platform.node() not in text
    assert f'"{getpass.getuser()}"' not in text
    assert json.loads(text) == json.loads((done[1] / "o.json").read_text())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--length", "1000000"], "--length 1000000: the pair takes"),
        (["--keep-pct", "2"], "must be a number in (0, 1]"),
        (["--submit", "."], "the machine is busy (load average 1000.0)"),
    ],
)
def test_what_can_not_be_measured_is_said_first(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measuring, "load_average", lambda: 1000.0)
    result = bench(*options)
    assert list(tmp_path.iterdir()) == []
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_pair_that_can_not_be_prefilled_sparsely_is_refused_before_anything_runs() -> None:
    alone: Any = SimpleNamespace(context_length=4096, draft_context=None, draft=None, sparse_refusal=None)
    with pytest.raises(SparseUnsupportedError, match="no draft model is loaded"):
        fitting_lengths(None, alone)
    refused: Any = SimpleNamespace(context_length=4096, draft_context=1000, draft="", sparse_refusal=None)
    assert fitting_lengths(None, refused) == (936,)  # none of the default lengths fits the draft


def test_the_page_of_machines_is_what_the_files_say() -> None:
    assert make_machines.PAGE.read_text(encoding="utf-8") == make_machines.page(), "run scripts/make_machines.py"
    assert all(measured.get("rows") or measured["checks"]["passed"] for measured in make_machines.measurements())


def test_a_measurement_of_today_fits_the_page(done: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_machines, "FOLDER", done[1] / "sent")
    assert "| demo | 25 % | 600 | " in make_machines.page()
