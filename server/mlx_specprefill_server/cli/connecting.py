"""`mlx-specprefill connect`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from ..connecting.agents import AGENTS, Agent, Setup
from ..connecting.changing import Change, forget, planned, restored, state_folder, write
from ..connecting.files import snippet
from ..connecting.running import RunningServer, find
from ..connecting.values import ConfigurationError
from .common import OptionError, one_line_errors

__all__ = ["AgentName", "connect", "setup_text"]

AgentName = Literal["codex", "opencode", "claude", "qwen", "cline", "continue", "aider", "zed", "open-webui"]

_ROOM = 1.5  # times an agent's first prompt: less of a window leaves no place for a task


def connect(
    agent: Annotated[AgentName, typer.Argument(help="The agent to set up.")],
    url: Annotated[str, typer.Option(help="Of the running server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="MLX_SPECPREFILL_API_KEY", help="If the server asks for one.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Which of the server's models. Default: its first.")] = None,
    write_files: Annotated[
        bool, typer.Option("--write", help="Put it into the agent's own files, after a look at what changes.")
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take back what --write did.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --undo: whole files as they were, without later changes.")
    ] = False,
) -> None:
    """Print the configuration that connects an agent with the running server, or write it.

    The address, the model's id and its window are the server's own. Files keep their comments, and are left alone
    where they can't be read. What was there before is kept in ~/.local/state/mlx-specprefill/connect.
    """
    with one_line_errors():
        if undo and write_files:
            raise OptionError("--write and --undo exclude each other")
        if force and not undo:
            raise OptionError("--force belongs to --undo")
        if undo:
            _undo(agent, force)
            return
        server = find(url, api_key, model)
        setup = AGENTS[agent].setup(server)
        if write_files:
            _write(agent, setup)
        else:
            typer.echo(setup_text(setup), nl=False)
        for note in _notes(AGENTS[agent], setup, server):
            typer.echo(f"note: {note}", err=True)


def setup_text(setup: Setup) -> str:
    """What a user has to put where."""
    parts = [f"# {file.path}\n{snippet(file.values, file.format)}" for file in setup.files]
    if setup.environment:
        parts.append("".join(f"export {name}={shlex.quote(value)}\n" for name, value in setup.environment.items()))
    return "\n".join(parts)


def _write(agent: str, setup: Setup) -> None:
    if not setup.files:
        raise ConfigurationError(f"{AGENTS[agent].title} has no file for this: run the command without --write")
    changes = planned(agent, setup.files)
    if not _shown(changes):
        typer.echo("Nothing to change.")
        return
    write(agent, changes)
    typer.echo(f"Written. `mlx-specprefill connect {agent} --undo` takes it back; copies are in {state_folder(agent)}.")
    for name, value in setup.environment.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def _undo(agent: str, force: bool) -> None:
    changes = restored(agent, force)
    _shown(changes)
    forget(agent, changes)
    typer.echo("Undone.")


def _shown(changes: Sequence[Change]) -> bool:
    """Prints what changes; False: nothing does."""
    diffs = [change.diff for change in changes if change.now != change.new]
    typer.echo("".join(diffs), nl=False)
    return bool(diffs)


def _notes(agent: Agent, setup: Setup, server: RunningServer) -> list[str]:
    if server.window >= _ROOM * agent.first_prompt:
        return list(setup.notes)
    small = (
        f"{agent.title} begins with a prompt of about {agent.first_prompt:,} tokens, and this model's window has "
        f"{server.window:,}: there is little room for a task, if any."
    )
    return [*setup.notes, small]
