"""The console command `mlx-specprefill` and its commands."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mlx_specprefill import __version__

from .benching import bench
from .connecting import connect
from .examining import doctor
from .generating import generate
from .grouped import SettingsCommand
from .inspecting import inspect
from .listing import list_models, recommend
from .pulling import pull
from .service import app as service_app
from .serving import serve
from .warming import warm

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """The commands. `eval` belongs to a package of its own, which is imported on use."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), "eval"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name != "eval":
            return super().get_command(ctx, cmd_name)
        return typer.main.get_command(importlib.import_module("mlx_specprefill_evals.cli").app)


app = typer.Typer(
    name="mlx-specprefill",
    cls=_Commands,
    help="Serve long prompts with SpecPrefill over MLX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(cls=SettingsCommand)(serve)
app.command()(pull)
app.command("list")(list_models)
for command in (recommend, connect, generate, inspect, bench, warm, doctor):
    app.command()(command)
app.add_typer(service_app, name="service")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mlx-specprefill {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Serve long prompts with SpecPrefill over MLX."""


def main() -> None:
    """Run the console command."""
    app(prog_name="mlx-specprefill")
