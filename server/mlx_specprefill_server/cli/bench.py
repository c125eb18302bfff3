"""The options of `mlx-specprefill bench`. Its work (`measuring`) is imported once they are read."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from ..settings.pair import ONE_SHOT, make_settings
from .common import OptionError, begin, choose_here, one_line_errors
from .options import Keep, Level, PairOptions, takes_pair

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
    begin(log_level)
    with one_line_errors():
        chosen = choose_here(models)
        settings = make_settings(chosen, specprefill_keep_pct=keep, **ONE_SHOT)
        work = import_module(".measuring", __package__)
        if work.is_busy(load := work.load_average()) and submit is not None:
            raise OptionError(f"the machine is busy (load average {load}): its times would say little. Try again later")
        _write(work.measure_pair(chosen, models.dtype, settings, lengths, repeats, load), out, submit)


def file_name(measured: dict[str, Any]) -> str:
    """Return the file's name, one per machine and pair."""
    words = (measured["machine"]["name"], f"{measured['machine']['cores']} cores", measured["pair"]["name"])
    return "--".join(re.sub(r"[^a-z0-9.]+", "-", word.lower()).strip("-") for word in words) + ".json"


def _write(measured: dict[str, Any], out: Path | None, submit: Path | None) -> None:
    text = json.dumps(measured, indent=1) + "\n"
    if out is not None:
        out.write_text(text, encoding="utf-8")
    if submit is not None:
        submit.mkdir(parents=True, exist_ok=True)
        file = submit / file_name(measured)
        file.write_text(text, encoding="utf-8")
        typer.echo(f"{file} is written. Put it into docs/machines, run scripts/make_machines.py, open a pull request.")
