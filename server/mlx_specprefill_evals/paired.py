"""Tables of items with known answers: every arm against full prefill, over the same items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .arms import FULL, Arm
from .records import Cell, Record
from .statistics import interval, paired_difference

AGAINST_FULL = ("score", "nll", "right")  # that full prefill has as well: differences
OF_FULL = ("kl", "top1", "same")  # that are about full prefill: means
PLAIN = ("mentioned", "recall", "kept")
HEAD = (
    "task",
    "tokens",
    "N",
    "arm",
    "score",
    "NLL",
    "tokens right",
    "KL",
    "top-1",
    "same answer",
    "names kept",
    "gold recall",
    "kept",
)


def is_known(record: Record) -> bool:
    return any("nll" in entry for entry in record.arms.values())


def right_in_full(records: Iterable[Record]) -> list[Record]:
    """Return the items that the model can answer at all."""
    return [record for record in records if record.arms.get(FULL.name, {}).get("score") == 1]


def paired_cells(records: Iterable[Record], arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Return per task, length and arm the means, and 95 % intervals of the differences to full prefill or of the means,
    JSON-ready.
    """
    cells: dict[Cell, list[Record]] = {}
    for record in records:
        if record.skipped is None and is_known(record):
            cells.setdefault(record.cell, []).append(record)
    return [
        {"task": cell.task, "length": cell.length, "n": len(own), "arms": dict(_rows(own, arms))}
        for cell, own in sorted(cells.items(), key=lambda pair: pair[0].length)
    ]


def _rows(records: Sequence[Record], arms: Sequence[Arm]) -> Iterator[tuple[str, dict[str, Any]]]:
    for arm in arms:
        having = [record for record in records if record.arms.get(arm.name)]
        if having:
            yield arm.name, {"n": len(having), **_measures(arm, having)}


def _measures(arm: Arm, records: Sequence[Record]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    groups = [record.group or record.number for record in records]
    for name in (*AGAINST_FULL, *OF_FULL, *PLAIN):
        if any(record.arms[arm.name].get(name) is None for record in records):
            continue
        values = [float(record.arms[arm.name][name]) for record in records]
        found[name] = {"mean": float(np.mean(values))}
        if arm != FULL and name in AGAINST_FULL:
            full = [record.arms[FULL.name][name] for record in records]
            mean, low, high = paired_difference(full, values, groups)
            found[name]["difference"] = {"mean": mean, "low": low, "high": high}
        elif name in OF_FULL:
            found[name] |= dict(zip(("low", "high"), interval(values, groups), strict=True))
    return found


def paired_markdown(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return a row per cell and arm. Brackets hold 95 % intervals, of the difference to full prefill if there is."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    for cell in cells:
        for name, row in cell["arms"].items():
            fields = [cell["task"], str(cell["length"]), str(row["n"]), name]
            fields += [_entry(row.get(measure)) for measure in (*AGAINST_FULL, *OF_FULL, *PLAIN)]
            lines.append("| " + " | ".join(fields) + " |")
    return "\n".join(lines)


def _entry(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    if "difference" in found:
        return f"{found['mean']:.2f} ({found['difference']['low']:+.2f} to {found['difference']['high']:+.2f})"
    if "low" in found:
        return f"{found['mean']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
    return f"{found['mean']:.2f}"
