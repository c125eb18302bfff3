"""Drawings of the command line: progress bars, the table of stages, the table of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from mlx_specprefill import PrefillReport, Progress

from ..explain import ExplainedChunk
from ..explaining.heatmap import chunk_state

__all__ = ["StageBars", "chunk_table", "stage_bars", "stage_summary", "stage_table"]

_PREVIEW = 60  # characters of a run's text in the table
_LABELS = {"draft": "draft reads the prompt", "prefill": "target reads its share"}


class StageBars:
    """Progress bars, one per stage that takes long. Other stages are not shown."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks = {stage: bars.add_task(label, total=None, visible=False) for stage, label in _LABELS.items()}

    def update(self, event: Progress) -> None:
        task = self._tasks.get(event.stage)
        if task is not None:
            self._bars.update(task, completed=event.done, total=event.total, visible=True)

    def start(self) -> None:
        self._bars.start()

    def stop(self) -> None:
        """Remove the bars from the screen, so that text can follow."""
        if self._bars.live.is_started:
            self._bars.stop()


@contextmanager
def stage_bars(console: Console) -> Iterator[StageBars]:
    """Show bars while the block runs, or until stopped. Show none without a terminal."""
    columns = (TextColumn("{task.description:>22}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars = StageBars(Bars(*columns, console=console, transient=True))
    try:
        if console.is_interactive:
            bars.start()
        yield bars
    finally:
        bars.stop()


def stage_table(report: PrefillReport, completion_tokens: int) -> Table:
    """Return the table of stages and their times. Rates are tokens per second of the row's own time."""
    times = report.timings
    read = report.prompt_tokens - report.cached_tokens
    rows: Iterable[tuple[str, float, int | None]] = (
        ("queue", times.queue_ms, None),
        ("draft", times.draft_ms, read),
        ("select", times.select_ms, None),
        ("prefill", times.prefill_ms, report.kept_tokens - report.cached_tokens),
        ("TTFT", times.ttft_ms, read),
        ("decode", times.decode_ms, max(completion_tokens - 1, 0)),
    )
    table = Table(show_edge=False)
    table.add_column("stage")
    for name in ("ms", "tokens", "tokens/s"):
        table.add_column(name, justify="right")
    for stage, milliseconds, tokens in rows:
        rate = f"{tokens / milliseconds * 1000:,.0f}" if tokens and milliseconds > 0 else ""
        shown = "" if tokens is None or milliseconds == 0 else f"{tokens:,}"
        table.add_row(stage, f"{milliseconds:,.1f}", shown, rate)
    return table


def stage_summary(report: PrefillReport, completion_tokens: int) -> str:
    share = report.kept_tokens / report.prompt_tokens
    cached = f", {report.cached_tokens:,} of them cached" if report.cached_tokens else ""
    return (
        f"mode {report.mode} ({report.reason}); the target saw {report.kept_tokens:,} of "
        f"{report.prompt_tokens:,} prompt tokens ({share:.1%}){cached}; {completion_tokens} tokens generated, "
        "the first of them within TTFT"
    )


def chunk_table(chunks: Sequence[ExplainedChunk], *, dropped_too: bool) -> Table:
    """Return the table of chunks: a row for every run of chunks of one state, with its best score."""
    runs = [(state, list(run)) for state, run in groupby(chunks, lambda chunk: chunk_state(chunk.info))]
    shown = [(state, [chunk.info for chunk in run], run) for state, run in runs if state != "dropped" or dropped_too]
    columns = {
        "tokens": [f"{infos[0].start}-{infos[-1].end - 1}" for _, infos, _ in shown],
        "chunks": [str(len(infos)) for _, infos, _ in shown],
        "score": [f"{max(info.score for info in infos):.2e}" for _, infos, _ in shown],
        "kept": [
            f"{sum(info.kept_tokens for info in infos)}/{infos[-1].end - infos[0].start}" for _, infos, _ in shown
        ],
        "state": [state for state, _, _ in shown],
    }
    table = Table(show_edge=False)
    for name, cells in columns.items():  # a narrow terminal cuts the text, never the numbers
        width = max(map(len, [name, *cells]))
        table.add_column(name, justify="left" if name == "state" else "right", min_width=width, no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis")
    for *cells, (_, _, run) in zip(*columns.values(), shown, strict=True):
        table.add_row(*cells, Text(" ".join("".join(chunk.text for chunk in run).split())[:_PREVIEW]))
    return table
