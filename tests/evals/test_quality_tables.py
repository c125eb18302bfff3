"""The tables of docs/quality.md say what the records say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mlx_specprefill_server.evals.records import Cell, Record, Records

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
    assert "not restored | difference (95 %) |\n| --- | --- | --- | --- | --- | --- | --- |\n\n<!-- end -->" in page


def test_known_answers_have_two_tables_of_their_own(tables, tmp_path):
    def known(number, full):
        against = {"nll": 1.0, "right": 1.0, "kl": 0.1, "top1": 1.0, "same": 1.0}
        held = {"held": 1.0} if full else {}
        arms = {"full": entry(full, nll=0.5, right=full, **held), "sparse@0.2": entry(1.0, **against, **held)}
        return Record(Cell("copy", 1024), number, arms)

    page = made(tables, tmp_path, [record(0, 1.0, 0.0), known(0, 0.0), known(1, 1.0)])
    first, _, second = page.partition("<!-- real tiny -->")[2].partition("<!-- real right tiny -->")
    assert "| copy | 1024 | 2 | sparse@0.2 | 1.00 (+0.00 to +1.00) | 1.00 (+0.50 to +0.50) |" in first
    assert "| copy | 1024 | 1 | sparse@0.2 | 1.00 (+0.00 to +0.00) |" in second
    assert "| copy |" not in page.partition("<!-- real tiny -->")[0]
