"""The suite's plots. matplotlib is an extra; without it there are only tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .records import Cell, Record

try:
    from matplotlib import figure as figures
    from matplotlib import rc_context
except ImportError:
    figures = None  # type: ignore[assignment]

CAN_PLOT = figures is not None
COLOURS = {
    "sparse": "#1f77b4", "absent": "#17becf", "paper": "#d62728", "random": "#888888", "random-absent": "#bbbbbb",
    "recency": "#bcbd22", "lexical": "#2ca02c", "renumbered": "#ff7f0e", "oracle": "#9467bd",
}  # fmt: skip


def plot_keeps(summary: Mapping[str, Any], file: Path) -> None:
    """Plot accuracy over the share of kept chunks: a panel per task and length, a line per arm, full prefill dashed."""
    cells = [cell for cell in summary["cells"] if len(cell["arms"]) > 1]
    if not cells:
        return
    columns = min(4, len(cells))
    rows = -(-len(cells) // columns)
    figure = figures.Figure(figsize=(3.1 * columns, 2.5 * rows))
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for panel, cell in zip(panels, cells, strict=False):
        for kind, points in _lines(cell["arms"]).items():
            panel.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=3,
                color=COLOURS[kind],
                label=kind,
            )
        panel.axhline(cell["full"], color="black", linestyle="--", linewidth=1, label="full")
        panel.set(title=f"{cell['task']}, {cell['length']} tokens", ylim=(-0.05, 1.05), xlim=(0, None))
        panel.title.set_fontsize(9)
    for panel in panels[len(cells) :]:
        panel.axis("off")
    handles: dict[str, Any] = {}
    for panel in panels:
        handles |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=7, fontsize=8)
    figure.supxlabel("share of chunks kept", y=0.06 if rows > 1 else 0.1, fontsize=9)
    figure.tight_layout(rect=(0, 0.1 if rows > 1 else 0.16, 1, 1))
    _save(figure, file)


def _lines(arms: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, row in arms.items():
        kind, _, keep = name.partition("@")
        if keep:
            lines.setdefault(kind, []).append((float(keep), row["accuracy"]))
    return {kind: sorted(points) for kind, points in lines.items()}


def plot_depths(records: Iterable[Record], arms: Sequence[str], task: str, file: Path) -> None:
    """Plot depth by length, a panel per arm, with accuracy as colour and number."""
    scores: dict[str, dict[Cell, list[float]]] = {arm: {} for arm in arms}
    for record in records:
        if record.cell.task == task and record.cell.depth is not None:
            for arm in arms:
                if record.arms.get(arm):
                    scores[arm].setdefault(record.cell, []).append(record.arms[arm]["score"])
    cells = {cell for found in scores.values() for cell in found}
    if not cells:
        return
    lengths, depths = sorted({c.length for c in cells}), sorted({c.depth for c in cells if c.depth is not None})
    figure = figures.Figure(figsize=(0.9 + (0.75 * len(lengths) + 0.6) * len(arms), 1.3 + 0.36 * len(depths)))
    panels = figure.subplots(1, len(arms), squeeze=False, sharey=True)[0]
    for panel, arm in zip(panels, arms, strict=True):
        grid = [[float(np.mean(scores[arm].get(Cell(task, n, d), [np.nan]))) for n in lengths] for d in depths]
        panel.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", alpha=0.6, aspect="auto")
        for (y, x), value in np.ndenumerate(np.array(grid)):
            if not np.isnan(value):
                panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8)
        panel.set(title=arm, xticks=range(len(lengths)), xticklabels=lengths, yticks=range(len(depths)))
        panel.set_yticklabels([f"{depth:.0%}" for depth in depths])
        panel.set_xlabel("tokens")
    panels[0].set_ylabel("depth")
    figure.tight_layout()
    _save(figure, file)


def _save(figure: Any, file: Path) -> None:
    """Save a plot with text as text and without a date. The same plot gives the same small file."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "plot"}):
        figure.savefig(file, metadata={"Date": None})
