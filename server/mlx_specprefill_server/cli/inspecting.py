"""The work of `mlx-specprefill inspect`: a prompt without a server, its bar and its table of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from mlx_specprefill import ChunkInfo, DtypeName, Inspection, SpecPrefillOptions

from ..explain import ExplainedChunk, explain_chunks
from ..pairs import Pair
from ..prompt.builder import PromptBuilder
from ..prompt.conversation import conversation
from ..settings.server import Settings
from .common import notes
from .loading import load_engine

_PREVIEW = 60  # characters of a run's text in the table


def chunk_table(chunks: Sequence[ExplainedChunk], *, dropped_too: bool) -> Table:
    """Return the table of chunks: a row for every run of chunks of one state, with its best score."""
    runs = [(state, list(run)) for state, run in groupby(chunks, lambda chunk: _state(chunk.info))]
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


def _state(chunk: ChunkInfo) -> str:
    """Return the chunk's state: dropped, kept for its score, or forced (at least in part) by a rule."""
    if not chunk.kept:
        return "dropped"
    return "forced" if chunk.forced else "kept"


def inspect(
    chosen: Pair,
    dtype: DtypeName,
    settings: Settings,
    text: str,
    options: SpecPrefillOptions,
    *,
    raw: bool,
    dropped_too: bool,
) -> None:
    """Show which chunks of a prompt the draft would keep.

    Args:
        text: the user's message; the whole prompt where it is `raw`.
        dropped_too: list the dropped chunks, too.
    """
    with load_engine(chosen, dtype, settings, settings.engine_config()) as engine:
        builder, message = PromptBuilder(engine.pair.tokenizer), conversation([{"role": "user", "content": text}])
        prompt = asyncio.run(builder.raw(text) if raw else builder.chat(message))
        request = prompt.request(1, options)
        with Progress(console=notes(), transient=True) as bars:
            task = bars.add_task("draft reads the prompt", total=None)
            inspection = engine.inspect(
                request, lambda event: bars.update(task, completed=event.done, total=event.total)
            )
        _show(inspection, explain_chunks(engine.pair.tokenizer, request.prompt, inspection), dropped_too=dropped_too)


def _show(inspection: Inspection, chunks: list[ExplainedChunk], *, dropped_too: bool) -> None:
    console = Console()
    console.print(chunk_table(chunks, dropped_too=dropped_too))
    kept = sum(chunk.kept for chunk in inspection.chunks)
    summary = (
        f"{inspection.kept_tokens} of {inspection.prompt_tokens} tokens kept, {kept} of {len(inspection.chunks)} "
        f"chunks; mode {inspection.mode}: {inspection.reason}"
    )
    console.print(summary, markup=False, highlight=False)
