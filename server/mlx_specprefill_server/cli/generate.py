"""`mlx-specprefill generate` and `inspect`: one prompt, without a server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from mlx_specprefill import (
    ChunkInfo,
    Engine,
    Failed,
    GenerationRequest,
    Inspection,
    PrefillReport,
    Progress,
    SamplingParams,
)

from ..explain import ExplainedChunk, explain_chunks
from ..local import stream_text
from ..pair_loading import ONE_SHOT, make_settings
from .common import (
    FAILED,
    OptionError,
    ask_server,
    begin,
    choose,
    make_prompt,
    notes,
    one_line_errors,
    options_of,
    read_text,
)
from .options import ApiKey, Keep, KvBits, Level, PairOptions, PrefillStep, Question, Raw, Rule, Url, takes_pair
from .pull import load_engine

_PREVIEW = 60  # characters of a run's text in the table
_LABELS = {"draft": "draft reads the prompt", "prefill": "target reads its share"}

PrefillMode = Literal["auto", "sparse", "full"]
_ENABLED: dict[PrefillMode, bool | None] = {"auto": None, "sparse": True, "full": False}


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


@takes_pair
def generate(
    prompt_file: Annotated[Path, typer.Option(help="A text file; - reads standard input.")],
    question: Question = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens in the answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    keep: Keep = None,
    rule: Rule = None,
    mode: Annotated[PrefillMode, typer.Option(help="auto: sparse above the pair's threshold.")] = "auto",
    raw: Raw = False,
    prefill_step: PrefillStep = None,
    kv_bits: KvBits = None,
    log_level: Level = "warning",
    *,
    models: PairOptions,
) -> None:
    """Answer one prompt and show the time of each stage: the answer on standard output, the rest on standard error."""
    begin(log_level)
    with one_line_errors():
        text = read_text(prompt_file)
        options = options_of(_ENABLED[mode], keep)
        chosen = choose(models)
        settings = make_settings(
            chosen,
            rule=rule,
            prefill_step=prefill_step,
            kv_bits=kv_bits,
            **ONE_SHOT,
        )
        with load_engine(chosen, models.dtype, settings, settings.engine_config()) as engine:
            prompt = make_prompt(engine.pair, text, question, raw)
            request = GenerationRequest(
                prompt.tokens,
                max_tokens,
                SamplingParams(temperature=temperature),
                options,
                spans=prompt.spans,
                about_everything=prompt.about_everything,
                stop_token_ids=engine.pair.eos_token_ids,
            )
            _answer(engine, request)


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


@takes_pair
def inspect(
    prompt_file: Annotated[Path | None, typer.Option(help="A text file; - reads standard input.")] = None,
    misses: Annotated[
        bool, typer.Option("--misses", help="Show instead why a running server read prompts again.")
    ] = False,
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    question: Question = None,
    keep: Keep = None,
    rule: Rule = None,
    raw: Raw = False,
    show_dropped: Annotated[bool, typer.Option("--all", help="List the dropped chunks too.")] = False,
    log_level: Level = "warning",
    *,
    models: PairOptions,
) -> None:
    """Show which chunks of a prompt the draft would keep, and why, without running the target."""
    begin(log_level)
    with one_line_errors():
        if misses:
            _show_misses(ask_server(url, "/v1/specprefill/stats", api_key, "recent")["recent"])
            return
        if prompt_file is None:
            raise OptionError("--prompt-file or --misses is needed")
        text = read_text(prompt_file)
        options = options_of(None, keep)
        chosen = choose(models)
        settings = make_settings(chosen, rule=rule, **ONE_SHOT)
        with load_engine(chosen, models.dtype, settings, settings.engine_config()) as engine:
            prompt = make_prompt(engine.pair, text, question, raw)
            request = GenerationRequest(
                prompt.tokens,
                1,
                specprefill=options,
                spans=prompt.spans,
                about_everything=prompt.about_everything,
            )
            with StageBars(notes()) as bars:
                inspection = engine.inspect(request, bars.show)
            chunks = explain_chunks(engine.pair.tokenizer, prompt.tokens, inspection)
            _show(inspection, chunks, dropped_too=show_dropped)


def _show(inspection: Inspection, chunks: list[ExplainedChunk], *, dropped_too: bool) -> None:
    console = Console()
    console.print(chunk_table(chunks, dropped_too=dropped_too))
    kept = sum(chunk.kept for chunk in inspection.chunks)
    summary = (
        f"{inspection.kept_tokens} of {inspection.prompt_tokens} tokens kept, {kept} of {len(inspection.chunks)} "
        f"chunks; mode {inspection.mode}: {inspection.reason}"
    )
    console.print(summary, markup=False, highlight=False)


def _show_misses(answers: Iterable[Mapping[str, Any]]) -> None:
    """Print a line for each of the last answers whose prompt was read again."""
    reports = [answer["specprefill"] for answer in answers if answer["specprefill"]]
    missed = [(report, report["cache"]["miss"]) for report in reports if "cache" in report]
    for report, miss in missed:
        place = "the template" if miss["role"] is None else f"message {miss['message']} ({miss['role']})"
        typer.echo(
            f"{report['cached_tokens']} of {report['prompt_tokens']} tokens were cached; "
            f"then, at token {miss['token']}, {place} differs ({miss['kind']}): {miss['was']!r} -> {miss['now']!r}; "
            f"{miss['read_tokens']} tokens were read again"
        )
    if not missed:
        typer.echo(f"None of the last {len(reports)} prompts was read again.")
