"""Tables from records: accuracy per cell and arm, and differences where the dense baseline allows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mlx_specprefill import __version__

from .arms import Arm
from .paired import paired_cells, paired_markdown, right_in_full
from .records import Cell, Record
from .statistics import DENSE_FLOOR, paired_difference

MEASURES = ("kept", "recall", "same", "seconds")
HEADINGS = {
    "kept": "kept",
    "recall": "gold recall",
    "same": "as in full",
    "seconds": "seconds",
}


def summarise(records: Iterable[Record], arms: Sequence[Arm]) -> dict[str, Any]:
    """Return the cells with their arms, the skipped items, and `paired_cells` of all known answers and of those right
    in full.

    JSON-ready.
    """
    groups: dict[Cell, list[Record]] = {}
    skipped = []
    for record in records:
        if record.skipped is None:
            groups.setdefault(record.cell, []).append(record)
        else:
            skipped.append({"item": f"{_name(record.cell)} number {record.number}", "why": record.skipped})
    everything = [record for own in groups.values() for record in own]
    return {
        "cells": [_cell(cell, groups[cell], arms) for cell in groups],
        "paired": paired_cells(everything, arms),
        "paired_right": paired_cells(right_in_full(everything), arms),
        "skipped": skipped,
    }


def _cell(cell: Cell, records: Sequence[Record], arms: Sequence[Arm]) -> dict[str, Any]:
    full = [record.arms["full"]["score"] for record in records]
    rows = {arm.name: _arm(arm.name, records) for arm in arms}
    found = {"task": cell.task, "length": cell.length, "n": len(records), "full": float(np.mean(full))}
    return found | {"arms": {name: row for name, row in rows.items() if row}}


def _arm(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """Return the means over the arm's items, with a difference only if full prefill can do the task."""
    having = [record for record in records if record.arms.get(name)]
    if not having:
        return {}
    scores = [record.arms[name]["score"] for record in having]
    full = [record.arms["full"]["score"] for record in having]
    row: dict[str, Any] = {"n": len(having), "accuracy": float(np.mean(scores))}
    if name != "full":
        if np.mean(full) < DENSE_FLOOR:
            row["difference"] = None
        else:
            mean, low, high = paired_difference(full, scores)
            row["difference"] = {"mean": mean, "low": low, "high": high}
    for measure in MEASURES:
        values = [record.arms[name][measure] for record in having if record.arms[name].get(measure) is not None]
        if values:
            row[measure] = float(np.mean(values))
    return row


def markdown(summary: Mapping[str, Any]) -> str:
    """Return one table with a row per cell and arm. One table per arm kind and share would be many.

    Cells of known answers have two of their own. A line above says what was run, so that the report can be passed on.
    """
    paired = {(cell["task"], cell["length"]) for cell in summary["paired"]}
    cells = [cell for cell in summary["cells"] if (cell["task"], cell["length"]) not in paired]
    parts = [_run(summary["run"])] if "run" in summary else []
    parts += [_accuracies(cells)] if cells or not paired else []
    if paired:
        parts += ["Known answers, all items:", paired_markdown(summary["paired"])]
        parts += ["Known answers, items that full prefill gets right:", paired_markdown(summary["paired_right"])]
    return "\n\n".join(parts)


def _run(described: Mapping[str, Any]) -> str:
    facts = {"mlx-specprefill": __version__, **described}
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _accuracies(cells: Sequence[Mapping[str, Any]]) -> str:
    used = [
        m for m in MEASURES if any(m in row for cell in cells for name, row in cell["arms"].items() if name != "full")
    ]
    head = ["task", "tokens", "n", "full", "arm", "accuracy", "difference (95 %)", *(HEADINGS[m] for m in used)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for cell in cells:
        for name, row in cell["arms"].items():
            if name != "full" or len(cell["arms"]) == 1:
                fields = [
                    cell["task"],
                    str(cell["length"]),
                    str(row["n"]),
                    f"{cell['full']:.2f}",
                    name,
                    f"{row['accuracy']:.2f}",
                ]
                fields += [_difference(row), *(f"{row[m]:.2f}" if m in row else "" for m in used)]
                lines.append("| " + " | ".join(fields) + " |")
    return "\n".join(lines)


def _difference(row: Mapping[str, Any]) -> str:
    if "difference" not in row:
        return ""
    found = row["difference"]
    if found is None:
        return f"none: full below {DENSE_FLOOR:g}"
    return f"{found['mean']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})"


def _name(cell: Cell) -> str:
    return f"{cell.task} at {cell.length} tokens"
