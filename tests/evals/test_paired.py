"""Tables of known answers: differences over the same items, intervals of what only the arms have."""

from __future__ import annotations

import pytest

from mlx_specprefill_evals.arms import arms
from mlx_specprefill_evals.paired import paired_cells, paired_markdown, right_in_full
from mlx_specprefill_evals.records import Cell, Record
from mlx_specprefill_evals.report import markdown, summarise

ARMS = arms(["sparse"], ["0.2"])


def record(number: int, full: float, sparse: float, nll: float, kl: float = 0.1) -> Record:
    known = {"full": {"score": full, "nll": 1.0, "right": full, "kept": 1.0}}
    known["sparse@0.2"] = {"score": sparse, "nll": nll, "right": sparse, "kl": kl, "top1": 1.0, "same": 1.0,
                           "kept": 0.2, "recall": 0.5}  # fmt: skip
    return Record(Cell("copy", 1024), number, known)


RECORDS = [record(0, 1, 1, 1.5), record(1, 1, 0, 1.5), record(2, 0, 1, 1.5, 0.3), record(3, 0, 0, 1.5, 0.3)]


def test_differences_are_over_the_same_items() -> None:
    (cell,) = paired_cells(RECORDS, ARMS)
    sparse = cell["arms"]["sparse@0.2"]
    assert cell["n"] == sparse["n"] == 4
    assert sparse["score"]["difference"]["mean"] == 0
    assert sparse["score"]["difference"]["low"] < 0 < sparse["score"]["difference"]["high"]
    assert sparse["nll"]["difference"] == {"mean": 0.5, "low": 0.5, "high": 0.5}
    assert sparse["kl"]["mean"] == pytest.approx(0.2)
    assert 0.1 <= sparse["kl"]["low"] < sparse["kl"]["high"] <= 0.3
    assert "difference" not in sparse["kl"]


def test_the_second_table_has_the_items_that_full_prefill_gets_right() -> None:
    (cell,) = paired_cells(right_in_full(RECORDS), ARMS)
    assert cell["n"] == 2
    assert cell["arms"]["full"]["score"]["mean"] == 1
    assert cell["arms"]["sparse@0.2"]["score"]["mean"] == 0.5


def test_an_arm_that_is_not_there_yet_is_left_out() -> None:
    (cell,) = paired_cells([Record(Cell("copy", 1024), 0, {"full": RECORDS[0].arms["full"]})], ARMS)
    assert set(cell["arms"]) == {"full"}


def test_rows_as_text() -> None:
    text = paired_markdown(paired_cells(RECORDS, ARMS))
    assert "| copy | 1024 | 4 | full | 0.50 | 1.00 | 0.50 |  |  |  |  |  | 1.00 |" in text
    assert "| 1.50 (+0.50 to +0.50) |" in text


def test_a_report_has_both_tables_and_no_other_for_known_answers() -> None:
    other = Record(Cell("niah_single_2", 1024), 0, {"full": {"score": 1.0, "kept": 1.0}})
    text = markdown(summarise([*RECORDS, other], ARMS))
    assert text.count("| copy | 1024 |") == 4
    assert text.count("| niah_single_2 | 1024 |") == 1
    assert markdown(summarise([other], ARMS)).count("Known answers") == 0
