"""`mlx-specprefill service`: the server as a service of this user."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated, Any

import typer

from ..service_managers import ServiceManager, manager
from ..settings import ENV_PREFIX
from .common import one_line_errors
from .serving import serve

__all__ = ["app"]

app = typer.Typer(
    help="The server as a service of this user, started at login: launchd on macOS, systemd on Linux.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_serve_app = typer.Typer(add_completion=False)
_serve_app.command()(serve)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def install(context: typer.Context) -> None:
    """Write the service's file and start it. Takes the options of serve.

    What MLX_SPECPREFILL_* variables say now is written into the file, too, which only its owner can read. Installing
    again replaces options and variables.
    """
    command: Any = typer.main.get_command(_serve_app)
    command.make_context("mlx-specprefill service install", list(context.args))  # refuses what serve would refuse
    environment = {name: value for name, value in os.environ.items() if name.upper().startswith(ENV_PREFIX)}
    with one_line_errors():
        system = manager()
        system.install([sys.executable, "-m", "mlx_specprefill_server", "serve", *context.args], environment)
        typer.echo(f"{system.file} is written and the service is started. What it says: mlx-specprefill service logs")
        if sys.platform.startswith("linux"):
            typer.echo("It ends when you log out, unless: loginctl enable-linger")


@app.command()
def status() -> None:
    """Show whether the service runs; ends with the service manager's own status."""
    with one_line_errors():
        command = _installed().status_command()
    _show(command)


@app.command()
def logs(
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="How many of the last lines.")] = 100,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as more is written.")] = False,
) -> None:
    """Show what the service has said."""
    with one_line_errors():
        command = _installed().logs_command(lines, follow)
    _show(command)


@app.command()
def remove() -> None:
    """Stop the service and delete its file."""
    with one_line_errors():
        system = manager()
        system.remove()
        typer.echo(f"The service is stopped, {system.file} is deleted.")


def _installed() -> ServiceManager:
    system = manager()
    system.need()
    return system


def _show(command: list[str]) -> None:
    with one_line_errors():
        done = subprocess.run(command, check=False)
    raise typer.Exit(done.returncode)
