"""`mlx-specprefill eval`. What loads a pair is imported once the options have been read."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from mlx_specprefill_evals.arms import ARM_KINDS
from mlx_specprefill_evals.arms import arms as make_arms
from mlx_specprefill_evals.command import Options, refuse_nothing
from mlx_specprefill_evals.command import evaluate as run
from mlx_specprefill_evals.remote import RemoteModel
from mlx_specprefill_evals.tasks import GROUPS
from mlx_specprefill_server.cli.common import begin, choose_here, one_line_errors
from mlx_specprefill_server.cli.options import Level, PairOptions, takes_pair
from mlx_specprefill_server.settings.server import default_text, description_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command("eval")
@takes_pair
def evaluate(
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", "--suite", help=f"A task, a group ({', '.join(GROUPS)}), or agents; repeat."),
    ] = None,
    lengths: Annotated[
        list[int] | None, typer.Option("--length", min=64, help="Prompt tokens; repeat. Default 1024.")
    ] = None,
    number: Annotated[int, typer.Option("-n", min=1, help="Items per task and length.")] = 20,
    arms: Annotated[
        list[str] | None, typer.Option("--arm", help=f"{', '.join(ARM_KINDS)}; repeat. Default: sparse, random.")
    ] = None,
    keeps: Annotated[
        list[str] | None,
        typer.Option("--keep", help=f"{description_of('specprefill_keep_pct')} Repeat for more."),
    ] = None,
    acceptance: Annotated[
        bool, typer.Option("--acceptance", help="Of agents, the sessions that no rule was chosen by.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Number of the first item.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for items and report. A run into the same folder is resumed.")
    ] = None,
    server: Annotated[
        str | None,
        typer.Option("--url", help="Use the server at this address instead of loading a pair."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model of that server. Default: its first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="API key of that server.")] = None,
    log_level: Level = "warning",
    *,
    models: PairOptions,
) -> None:
    """Measure sparse prefill on tasks with known answers. The last line is the report as JSON."""
    begin(log_level)
    with one_line_errors():
        options = Options(
            tasks=tuple(tasks or ("niah_single_2",)),
            lengths=tuple(lengths or (1024,)),
            arms=make_arms(
                arms or ["sparse"] + ([] if server else ["random"]), keeps or [default_text("specprefill_keep_pct")]
            ),
            number=number,
            seed=seed,
            out=out,
            acceptance=acceptance,
        )
        refuse_nothing(options)
        if server is not None:
            typer.echo(json.dumps(run(options, RemoteModel(server, model, api_key), _tell)))
            return
        chosen = choose_here(models)
        work = import_module(".here", __package__)
        report = work.evaluate_here(options, chosen, models.dtype, _tell)
        typer.echo(json.dumps(report))


def _tell(line: str) -> None:
    typer.echo(line, err=True)
