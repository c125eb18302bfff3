"""The tables of docs/quality.md say what the records say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mlx_specprefill_evals.records import Cell, Record, Records

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_quality_tables.py"
PAGE = """text
<!-- tiny -->
stale
<!-- end -->
<!-- distributions -->
<!-- end -->
<!-- positions -->
<!-- end -->
<!-- real tiny -->
<!-- end -->
<!-- real right tiny -->
<!-- end -->
"""


@pytest.fixture
def tables(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("make_quality_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PAGE", tmp_path / "quality.md")
    monkeypatch.setattr(module, "PLOTS", tmp_path)
    module.PAGE.write_text(PAGE, encoding="utf-8")
    return module


def entry(score, **more):
    return {"score": score, "answer": "", "kept": 0.2, **more}


def record(number, sparse, renumbered, full=1.0):
    arms = {"full": entry(full), "sparse@0.2": entry(sparse, recall=0.5, kl=0.25)}
    if renumbered is not None:
        arms["renumbered@0.2"] = entry(renumbered)
    return Record(Cell("niah_single_2", 1024, 0.5), number, arms)


def made(tables, tmp_path, records):
    stored = Records(tmp_path / "tiny" / "items.jsonl", {"target": "tiny"})
    for one in records:
        stored.add(one)
    tables.main([str(tmp_path)])
    return tables.PAGE.read_text(encoding="utf-8")


def test_accuracy_interval_and_items_of_every_arm(tables, tmp_path):
    page = made(
        tables, tmp_path, [record(0, 1.0, 0.0), record(1, 1.0, 1.0), record(2, 0.0, None), record(3, 1.0, None)]
    )
    assert "stale" not in page
    assert "| niah_single_2 | 1024 | 4 | 1.00 | .75 (-.75 to +.00) | .50 (-1.00 to +.00) N=2 | - / .50 |" in page
    assert "| tiny | niah_single_2 | 1024 | 4 | sparse@0.2 | - | .250 | - | - |" in page
    assert "| tiny | niah_single_2 | 1024 | 2 | 1.00 | .50 | -0.500 (-1.000 to +0.000) |" in page


def test_no_difference_where_full_prefill_fails(tables, tmp_path):
    page = made(tables, tmp_path, [record(0, 0.0, 0.0, full=0.0)])
    assert "| niah_single_2 | 1024 | 1 | .00 | .00 | .00 |" in page
    assert "restored" not in page


def test_a_table_for_which_a_run_has_nothing_stays(tables, tmp_path):
    """Runs of one suite must not empty the tables of another."""
    old = tables.PAGE.read_text(encoding="utf-8").replace(
        "<!-- positions -->", "<!-- positions -->\n\n| measured before |\n"
    )
    tables.PAGE.write_text(old, encoding="utf-8")
    page = made(tables, tmp_path, [record(0, 0.0, 0.0, full=0.0)])
    assert "| measured before |" in page
    assert "stale" not in page
