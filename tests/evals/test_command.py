"""Whole runs with a model under test that answers by rule: resuming, skipping, refusing, reporting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_specprefill import InvalidRequestError
from mlx_specprefill_evals.arms import arms
from mlx_specprefill_evals.command import Options, evaluate
from mlx_specprefill_evals.errors import (
    NothingToDoError,
    NotMeasuredError,
    OtherRunError,
    UnreachableError,
)
from mlx_specprefill_evals.suite import all_values
from tests.evals.fakes import FakeModel, gold


def options(**more):
    chosen = {
        "tasks": ("needle",),
        "lengths": (500,),
        "arms": arms(["sparse"], ["0.2"]),
        "number": 4,
    }
    return Options(**(chosen | more))


def run(model, **more):
    told: list[Any] = []
    return evaluate(options(**more), model, told.append), told


def wrong_when_sparse(arm, item, number):
    return "no idea" if arm.kind == "sparse" and number % 2 else gold(arm, item, number)


def test_difference_and_measures_are_means_over_items():
    report, _ = run(FakeModel(wrong_when_sparse))
    (cell,) = report["cells"]
    assert (cell["n"], cell["full"]) == (4, 1.0)
    row = cell["arms"]["sparse@0.2"]
    assert row["accuracy"] == 0.5
    assert row["difference"]["mean"] == -0.5
    assert row["difference"]["low"] <= -0.5 <= row["difference"]["high"]
    assert row["kept"] == 0.25


def test_the_cost_is_told_first_and_only_of_what_is_left(tmp_path):
    def seconds(tokens, arm):
        return tokens * (0.01 if arm.kind == "full" else 0.002)

    def told(**more):
        lines: list[Any] = []
        evaluate(options(out=tmp_path, **more), FakeModel(gold), lines.append, seconds)
        return lines[0]

    first = told(lengths=(500, 1000))
    assert first == "to measure: 8 items, 16 prompts, about 12,000 tokens; their prefills take about 72 s"
    more = told(lengths=(500,), arms=arms(["sparse"], ["0.2", "0.4"]), number=5)  # one arm of four items, three of one
    assert more == "to measure: 5 items, 7 prompts, about 3,500 tokens; their prefills take about 11 s"
    assert told() == "everything has been measured before"
    assert run(FakeModel(gold))[1][0] == "to measure: 4 items, 8 prompts, about 4,000 tokens"


def test_no_difference_is_given_where_full_prefill_fails():
    report, told = run(FakeModel(lambda arm, item, number: "no idea" if number < 2 else gold(arm, item, number)))
    assert report["cells"][0]["full"] == 0.5
    assert report["cells"][0]["arms"]["sparse@0.2"]["difference"] is None
    assert "none: full below 0.8" in told[-1]


def test_a_failing_item_is_skipped_and_reported():
    def answer(arm, item, number):
        if number == 2:
            raise NotMeasuredError("the answer has no choices")
        return gold(arm, item, number)

    report, told = run(FakeModel(answer))
    assert report["cells"][0]["n"] == 3
    assert report["skipped"] == [{"item": "needle at 500 tokens number 2", "why": "the answer has no choices"}]
    assert any("skipped: needle, number 2: the answer has no choices" in line for line in told)


def test_unknown_tasks_are_left_out_and_the_rest_runs():
    report, told = run(FakeModel(gold), tasks=("needle", "nonsense"))
    assert report["cells"][0]["n"] == 4
    assert "no task 'nonsense'" in report["left_out"][0]
    assert sum(line.startswith("left out: ") for line in told) == 1
    with pytest.raises(NothingToDoError):
        run(FakeModel(gold), tasks=("nonsense",))


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path):
    def interrupted(arm, item, number):
        if number == 2:
            raise KeyboardInterrupt
        return gold(arm, item, number)

    with pytest.raises(KeyboardInterrupt):
        run(FakeModel(interrupted), out=tmp_path)
    with (tmp_path / "items.jsonl").open("a") as cut_off:
        cut_off.write('{"cell": {"ta')
    again = FakeModel(gold)
    report, _ = run(again, out=tmp_path)
    assert again.asked == [(2, ("full", "sparse@0.2")), (3, ("full", "sparse@0.2"))]
    assert report["cells"][0]["n"] == 4
    assert json.loads((tmp_path / "report.json").read_text()) == report
    third = FakeModel(gold)
    assert run(third, out=tmp_path)[0] == report  # what was cut off above did not swallow the next line
    assert third.asked == []


def test_more_arms_ask_only_for_what_is_missing(tmp_path: Path):
    run(FakeModel(gold), out=tmp_path)
    more = FakeModel(gold)
    report, _ = run(more, out=tmp_path, arms=arms(["sparse"], ["0.2", "0.5"]))
    assert {names for _, names in more.asked} == {("sparse@0.5",)}
    assert set(report["cells"][0]["arms"]) == {"full", "sparse@0.2", "sparse@0.5"}


def test_a_folder_of_another_run_is_refused(tmp_path: Path):
    run(FakeModel(gold), out=tmp_path)
    with pytest.raises(OtherRunError, match="choose another --out"):
        run(FakeModel(gold), out=tmp_path, seed=7)


def test_a_server_that_is_gone_ends_the_run_and_keeps_what_was_measured(tmp_path: Path):
    def answer(arm, item, number):
        if number >= 1:
            raise UnreachableError("no answer from http://x")
        return gold(arm, item, number)

    with pytest.raises(UnreachableError, match="goes on from here"):
        run(FakeModel(answer), out=tmp_path, number=10)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["cells"][0]["n"] == 1
    assert len(report["skipped"]) == 2  # the third ended the run
    again = FakeModel(gold)
    assert run(again, out=tmp_path, number=10)[0]["cells"][0]["n"] == 10
    assert [number for number, _ in again.asked] == list(range(1, 10))


def test_the_table_is_written(tmp_path: Path):
    chosen = arms(["sparse", "random"], ["0.2", "0.5"])
    run(FakeModel(wrong_when_sparse), out=tmp_path, arms=chosen, lengths=(500, 800))
    table = (tmp_path / "report.md").read_text().splitlines()
    assert "model fake, seed 0" in table[0]  # what is pasted says what was run
    assert table[2].startswith("| task | tokens | n | full | arm | accuracy |")
    assert len(table) == 4 + 2 * 4  # two lengths, two arms at two shares


def test_a_score_is_the_share_of_the_values() -> None:
    assert all_values("Codes 12 and Red.", ["12", "red", "99"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("kinds", "keeps"),
    [(["best"], ["0.2"]), *((["sparse"], [keep]) for keep in ("0", "x", "auto", "0.2:0.1"))],
)
def test_bad_arms_and_shares_are_named(kinds, keeps):
    with pytest.raises(InvalidRequestError, match=r"best|--keep"):
        arms(kinds, keeps)
