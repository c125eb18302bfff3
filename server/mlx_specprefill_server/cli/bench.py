"""`mlx-specprefill bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mlx_specprefill import Engine, ModelPair, SparseUnsupportedError

from ..benchmark import BenchmarkError, Plan, file_name, load_before, measure, record
from .common import ONE_SHOT, begin, choose, make_settings, notes, one_line_errors
from .options import Keep, Level, PairOptions, takes_pair
from .pull import load

__all__ = ["bench", "fitting"]

LENGTHS = (1024, 2048, 4096, 8192)


@takes_pair
def bench(
    lengths: Annotated[
        list[int] | None,
        typer.Option("--length", min=64, help=f"Prompt tokens; repeat. Default {', '.join(map(str, LENGTHS))}."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each length per arm.")] = 3,
    keep: Keep = None,
    out: Annotated[Path | None, typer.Option(help="Write the measurement to this JSON file.")] = None,
    submit: Annotated[
        Path | None,
        typer.Option(help="Write the measurement into this folder, named for the page of measured machines."),
    ] = None,
    log_level: Level = "warning",
    *,
    models: PairOptions,
) -> None:
    """Measure the time to the first token of a pair on this machine, sparse against full.

    Leave the machine alone meanwhile. Nothing that names a person, a host or a
    folder is in what --out and --submit write.
    """
    load_then = load_before()
    begin(log_level)
    with one_line_errors():
        chosen = choose(models)
        settings = make_settings(chosen, specprefill_keep_pct=keep, **ONE_SHOT)
        loaded = load(chosen, models.dtype, settings, calibrate=True)
        plan = Plan(fitting(lengths, loaded), settings.specprefill_keep_pct, repeats)
        with Engine(loaded, settings.engine_config()) as engine:
            measured = record(engine, chosen.alias or loaded.target_id, plan, _measure(engine, plan), load_then)
        Console().print(_table(measured))
        _write(measured, out, submit)


def fitting(lengths: list[int] | None, pair: ModelPair) -> tuple[int, ...]:
    """Return the requested prompt lengths, or the default ones that the pair can take.

    Raises:
        SparseUnsupportedError: it can't be prefilled sparsely; BenchmarkError: a length is too long for it.
    """
    longest = min(pair.context_length, pair.draft_context or pair.context_length) - 64
    if pair.draft is None or pair.sparse_refusal is not None:
        raise SparseUnsupportedError(pair.sparse_refusal or "no draft model is loaded")
    if lengths and max(lengths) > longest:
        raise BenchmarkError(f"--length {max(lengths)}: the pair takes {longest} tokens at most")
    return tuple(sorted(set(lengths or [length for length in LENGTHS if length <= longest] or [longest])))


def _measure(engine: Engine, plan: Plan) -> list[Any]:
    with Progress(console=notes(), transient=True) as bars:
        task = bars.add_task("Measuring", total=plan.requests)
        return measure(engine, plan, lambda: bars.advance(task))


def _table(measured: dict[str, Any]) -> Table:
    machine, keep = measured["machine"], measured["keep"]
    table = Table(show_edge=False)
    table.title = f"{measured['pair']['name']} on {machine['name']}, {machine['cores']} cores, keep {keep}"
    for name in ("tokens", "full s", "sparse s", "times sooner", "tokens read"):
        table.add_column(name, justify="right")
    for row in measured["rows"]:
        times = (f"{row['full_s']:.3g}", f"{row['sparse_s']:.3g}", f"{row['speedup']:.1f}")
        table.add_row(f"{row['tokens']:,}", *times, f"{row['kept_tokens']:,}")
    if machine["busy"]:
        table.caption = "The machine was busy: these times say little."
    return table


def _write(measured: dict[str, Any], out: Path | None, submit: Path | None) -> None:
    text = json.dumps(measured, indent=1) + "\n"
    if out is not None:
        out.write_text(text, encoding="utf-8")
    if submit is not None:
        submit.mkdir(parents=True, exist_ok=True)
        file = submit / file_name(measured)
        file.write_text(text, encoding="utf-8")
        typer.echo(f"{file} is written. Put it into docs/machines, run scripts/make_machines.py, open a pull request.")
