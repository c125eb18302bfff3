"""One prompt without a server: the work of `generate` and `inspect`, its bars and its tables."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from mlx_specprefill import (
    ChunkInfo,
    DtypeName,
    Engine,
    Failed,
    GenerationRequest,
    Inspection,
    ModelPair,
    PrefillReport,
    Progress,
    SamplingParams,
    SpecPrefillOptions,
)

from ..explain import ExplainedChunk, explain_chunks
from ..local import stream_text
from ..pairs import Pair
from ..prompt.conversation import conversation
from ..prompt.prompt import PromptBuilder
from ..settings import Settings
from .common import FAILED, notes
from .loading import load_engine

_PREVIEW = 60  # characters of a run's text in the table
_LABELS = {"draft": "draft reads the prompt", "prefill": "target reads its share"}


class StageBars(Bars):
    """Progress bars in a context, one per stage that takes long. There are none without a terminal."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description:>22}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_interactive)
        self._stages = {stage: self.add_task(label, total=None, visible=False) for stage, label in _LABELS.items()}

    def show(self, event: Progress) -> None:
        if (task := self._stages.get(event.stage)) is not None:
            self.update(task, completed=event.done, total=event.total, visible=True)

    def stop(self) -> None:
        """Remove the bars from the screen, so that text can follow."""
        if self.live.is_started:
            super().stop()


def stage_table(report: PrefillReport, completion_tokens: int) -> Table:
    """Return the table of stages and their times. Rates are tokens per second of the row's own time."""
    times = report.timings
    read = report.prompt_tokens - report.cached_tokens
    rows: Iterable[tuple[str, float | None, int | None]] = (
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
    for stage, ms, tokens in rows:
        milliseconds = ms or 0.0  # no first token: an empty answer
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


@dataclass(frozen=True, slots=True)
class CliPrompt:
    """A prompt on the command line, and how it is to be read and answered.

    Attributes:
        question: appended to the text, in the same user message.
        raw: the text is the prompt, without a chat template.
    """

    text: str
    question: str | None
    raw: bool
    options: SpecPrefillOptions
    max_tokens: int = 1
    temperature: float = 0.0

    def request(self, pair: ModelPair) -> GenerationRequest:
        whole = self.text if self.question is None else f"{self.text.rstrip()}\n\n{self.question}"
        builder = PromptBuilder(pair.tokenizer)
        messages = [{"role": "user", "content": whole}]
        prompt = asyncio.run(builder.raw(whole) if self.raw else builder.chat(conversation(messages)))
        return GenerationRequest(
            prompt.tokens,
            self.max_tokens,
            SamplingParams(temperature=self.temperature),
            self.options,
            spans=prompt.spans,
            about_everything=prompt.about_everything,
            stop_token_ids=pair.eos_token_ids,
        )


def answer(chosen: Pair, dtype: DtypeName, settings: Settings, prompt: CliPrompt) -> None:
    """Answer the prompt, and show the time of each stage."""
    with load_engine(chosen, dtype, settings, settings.engine_config()) as engine:
        _answer(engine, prompt.request(engine.pair))


def _answer(engine: Engine, request: GenerationRequest) -> None:
    console = notes()
    with StageBars(console) as bars:

        def show(text: str) -> None:
            bars.stop()
            typer.echo(text, nl=False)

        _, last = stream_text(engine, request, show, bars.show)
    typer.echo()
    if isinstance(last, Failed):
        typer.echo(f"error: {last.error}", err=True)
        raise typer.Exit(FAILED)
    console.print(stage_table(last.report, last.completion_tokens))
    console.print(stage_summary(last.report, last.completion_tokens), markup=False, highlight=False)


def inspect(chosen: Pair, dtype: DtypeName, settings: Settings, prompt: CliPrompt, *, dropped_too: bool) -> None:
    """Show which chunks of the prompt the draft would keep."""
    with load_engine(chosen, dtype, settings, settings.engine_config()) as engine:
        request = prompt.request(engine.pair)
        with StageBars(notes()) as bars:
            inspection = engine.inspect(request, bars.show)
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
