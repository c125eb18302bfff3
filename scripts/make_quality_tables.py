#!/usr/bin/env python3
"""Tables and plots of docs/quality.md from runs of the suite.

    python scripts/eval_quality.py --pair NAME ... --out RUNS        any number of times, any arms, tasks and lengths
    python scripts/make_quality_tables.py RUNS                       writes docs/quality/*.svg and the tables

RUNS holds a folder per pair. In docs/quality.md what stands between `<!-- NAME -->` and `<!-- end -->` is replaced.
Known answers, such as those of the suite `real`, go to `<!-- real NAME -->`; those that full prefill gets right go to
`<!-- real right NAME -->` as well.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_specprefill_evals import plots
from mlx_specprefill_evals.arms import FULL, Arm, ArmKind, arms
from mlx_specprefill_evals.paired import is_known, paired_markdown
from mlx_specprefill_evals.records import Record, Records
from mlx_specprefill_evals.report import summarise
from mlx_specprefill_evals.statistics import DENSE_FLOOR, paired_difference

ROOT = Path(__file__).resolve().parents[1]
PAGE, PLOTS = ROOT / "docs" / "quality.md", ROOT / "docs" / "quality"
ARMS = (
    *arms(["sparse", "paper"], ["0.1", "0.2", "0.3", "0.5"]),
    *arms(["oracle", "renumbered", "lexical", "recency", "random"], ["0.2"])[1:],
)
HEAT_MAP = ("niah_single_2", ("full", "sparse@0.1", "sparse@0.2", "random@0.2"))
PROBED = {"mass": "attention kept", "kl": "KL", "top1": "top-1", "ppl_ratio": "PPL ratio"}


HEADING = 2  # lines of a table without rows


def main(arguments: list[str] | None = None) -> None:
    """Replace all tables of pairs that have runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder that `eval_quality.py --out` wrote")
    runs = {
        file.parent.name: _records(file) for file in sorted(parser.parse_args(arguments).runs.glob("*/items.jsonl"))
    }
    page = PAGE.read_text(encoding="utf-8")
    for name, records in runs.items():
        summary = summarise(records, ARMS)
        summary["cells"].sort(key=lambda cell: (cell["task"], cell["length"]))
        paired = {(cell["task"], cell["length"]) for cell in summary["paired"]}
        others = [cell for cell in summary["cells"] if (cell["task"], cell["length"]) not in paired]
        page = _replaced(page, name, _accuracy(others))
        page = _replaced(page, f"real {name}", paired_markdown(summary["paired"]).splitlines())
        page = _replaced(page, f"real right {name}", paired_markdown(summary["paired_right"]).splitlines())
        swept = [cell for cell in summary["cells"] if "sparse@0.1" in cell["arms"]]
        plots.plot_keeps({"cells": swept}, PLOTS / f"keeps-{name}.svg")
        plots.plot_depths(records, HEAT_MAP[1], HEAT_MAP[0], PLOTS / f"depths-{name}.svg")
    page = _replaced(page, "distributions", _distributions(runs))
    page = _replaced(page, "positions", _positions(runs))
    PAGE.write_text(page, encoding="utf-8")


def _records(file: Path) -> list[Record]:
    with file.open(encoding="utf-8") as lines:
        described = json.loads(next(lines))["run"]
    return list(Records(file, described))


def _replaced(page: str, name: str, table: Iterable[str]) -> str:
    """The page with another table of that name; the old one stays where the runs have nothing for it."""
    lines = list(table)
    if len(lines) <= HEADING:
        return page
    body = "\n".join(lines)
    pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda found: f"{found[1]}\n{body}\n\n{found[2]}", page, flags=re.DOTALL)


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _accuracy(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row per task and length, a column per arm: accuracy, and the interval of its difference to full prefill."""
    used = [arm for arm in ARMS if arm != FULL and any(arm.name in cell["arms"] for cell in cells)]
    head = ["task", "tokens", "N", "full", *(_title(arm) for arm in used), "gold recall at .1 / .2"]
    rows = (
        [cell["task"], str(cell["length"]), str(cell["n"]), _short(cell["full"])]
        + [_entry(cell, arm) for arm in used]
        + [" / ".join(_short(cell["arms"].get(f"sparse@{keep}", {}).get("recall")) for keep in ("0.1", "0.2"))]
        for cell in cells
    )
    return _rows(head, rows)


def _title(arm: Arm) -> str:
    share = arm.keep if isinstance(arm.keep, str) else _short(float(arm.keep or 1), ".1f")
    return f"{arm.kind} {share}"


def _entry(cell: Mapping[str, Any], arm: Arm) -> str:
    row = cell["arms"].get(arm.name)
    if row is None:
        return ""
    text = _short(row["accuracy"])
    found = row["difference"]
    if found and (found["low"], found["high"]) != (0, 0):
        text += f" ({_short(found['low'], '+.2f')} to {_short(found['high'], '+.2f')})"
    return text if row["n"] == cell["n"] else f"{text} N={row['n']}"


def _short(value: float | None, form: str = ".2f") -> str:
    """Without the zero before the point."""
    if value is None:
        return "-"
    text = format(value, form)
    return text.replace("0.", ".", 1) if abs(value) < 1 and float(text) not in (1, -1) else text


def _distributions(runs: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """A row per arm over the probed items only."""
    rows = (
        [name, cell["task"], str(cell["length"]), str(cell["n"]), arm, *(_short(row.get(key), ".3f") for key in PROBED)]
        for name, records in runs.items()
        for cell in summarise([r for r in records if _probed(r)], ARMS)["cells"]
        for arm, row in cell["arms"].items()
        if "kl" in row
    )
    return _rows(["pair", "task", "tokens", "N", "arm", *PROBED.values()], rows)


def _probed(record: Record) -> bool:
    return not is_known(record) and any("kl" in entry for entry in record.arms.values())


def _positions(runs: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """Positions restored against not restored, over the same items and the same kept tokens."""
    rows = (
        [name, task, str(length), *_compared(records, task, length)]
        for name, records in runs.items()
        for task, length in sorted({(record.cell.task, record.cell.length) for record in records})
    )
    head = ["pair", "task", "tokens", "N", "restored", "not restored", "difference (95 %)"]
    return _rows(head, (row for row in rows if len(row) == len(head)))


def _compared(records: Iterable[Record], task: str, length: int) -> list[str]:
    """Nothing where full prefill can't do the task, or nobody asked."""
    kinds: tuple[ArmKind, ...] = ("sparse", "renumbered")
    cell = [r for r in records if (r.cell.task, r.cell.length) == (task, length)]
    both = [r for r in cell if all(r.arms.get(f"{kind}@0.2") for kind in kinds)]
    if not both or np.mean([r.arms["full"]["score"] for r in both]) < DENSE_FLOOR:
        return []
    restored, moved = ([r.arms[f"{kind}@0.2"]["score"] for r in both] for kind in kinds)
    mean, low, high = paired_difference(restored, moved)
    texts = [_short(float(np.mean(scores))) for scores in (restored, moved)]
    return [str(len(both)), *texts, f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"]


if __name__ == "__main__":
    main()
