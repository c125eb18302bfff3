"""The commands `connect` and `launch`: what sets an agent up for a running server, printed or carried out."""

from __future__ import annotations

import shlex
import time
from typing import Annotated

import typer

from ..common import OptionError, ask_server, begin, one_line_errors
from ..options import ApiKey, PairOptions, Url, takes_pair
from .launching import Serving, program_of, run, write_files
from .setup import AGENTS, LAUNCHED, RunningServer, Setup, any_other

_SMALL_WINDOW = 32_000  # tokens
_READING_S, _POLL_S = 30.0, 0.5  # seconds; a server of several models reads their windows after its start
Model = Annotated[str | None, typer.Option(help="Name of one of the server's models. Default: its first.")]


def connect(
    agent: Annotated[str, typer.Argument(help=f"{', '.join(AGENTS)}, or any other.")],
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    model: Model = None,
) -> None:
    """Print the command that starts an agent on the running server, or the text to add to an editor's files.

    The address, the model's id and its window are the server's own. No file is changed.
    """
    with one_line_errors():
        server = _find(url, api_key, model)
        setup = AGENTS.get(agent, any_other)(server)
        typer.echo(text_of(setup), nl=False)
        _notify(setup, server)
        if agent in LAUNCHED:
            typer.echo(f"note: `mlx-specprefill launch {agent}` does all this", err=True)


@takes_pair
def launch(
    agent: Annotated[str, typer.Argument(help=f"One of {', '.join(LAUNCHED)}.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="Its own.")] = None,
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    model: Model = None,
    *,
    models: PairOptions,
) -> None:
    """Start an agent on this machine's server, and the server if none runs at that address. It ends with the agent.

    No file of yours is touched: what the agent has to know are variables, options, and files in our own folder.
    """
    begin("warning")
    with one_line_errors():
        if agent not in LAUNCHED:
            known = f"`mlx-specprefill connect {agent}` prints its settings" if agent in AGENTS else "it is not known"
            raise OptionError(f"{agent} can't be launched, only {', '.join(LAUNCHED)}; {known}")
        program = program_of(agent)
        with Serving(url, models, api_key):
            server = _find(url, api_key, model)
            _check_tools(agent, server)
            setup = AGENTS[agent](server)
            _notify(setup, server)
            write_files(setup)
            status = run([program, *setup.command[1:], *(arguments or ())], setup.environment)
    raise typer.Exit(status)


def _check_tools(agent: str, server: RunningServer) -> None:
    if not server.tools:
        raise OptionError(
            f"{server.model} can't call tools, and {agent} does everything by them: its chat template has no place for "
            "any. `mlx-specprefill recommend` names models that have one"
        )


def _notify(setup: Setup, server: RunningServer) -> None:
    for note in setup.notes:
        typer.echo(f"note: {note}", err=True)
    if not server.tools:
        typer.echo("note: this model's chat template has no place for tools: agents can't call any", err=True)
    if server.window < _SMALL_WINDOW:
        typer.echo(f"note: the window has {server.window:,} tokens; agents begin with 3,000 to 20,000", err=True)


def _find(url: str, key: str | None, wanted: str | None) -> RunningServer:
    """Return the server at this address with its model of this name, or its first; raises OptionError."""
    base = url.rstrip("/").removesuffix("/v1")
    until = time.monotonic() + _READING_S
    while True:
        name, window, tools, error = _model(base, key, wanted)
        if window is not None:
            return RunningServer(base, name, window, key or "none", tools)  # some clients insist on a key
        if error is not None or time.monotonic() > until:
            why = error or "it has not read its files yet"
            raise OptionError(f"{base} does not know the window of {name}: {why}")
        time.sleep(_POLL_S)


def _model(base: str, key: str | None, wanted: str | None) -> tuple[str, int | None, bool, str | None]:
    """Return a model's id, its window if that is known, whether it can call tools, and why it can't be loaded."""
    models = ask_server(base, "/v1/models", key, "data")["data"]
    try:
        named = [model for model in models if wanted in (None, model["id"], *model.get("aliases", ()))]
        if not models:
            raise OptionError(f"{base} has no models")
        if not named:
            raise OptionError(f"{base} has no model {wanted!r}; it has: {', '.join(model['id'] for model in models)}")
        tools = (named[0].get("tools") or {}).get("definitions", True)
        return named[0]["id"], named[0]["context_length"], tools, named[0].get("error")
    except (KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"{base}/v1/models does not answer as this project's server does: {error!r}") from error


def text_of(setup: Setup) -> str:
    """Return the variables, in a command where one starts the agent, and then the text for each file."""
    pairs = [f"{name}={shlex.quote(value)}" for name, value in setup.environment.items()]
    start = " \\\n".join([*pairs, shlex.join(setup.command)]) + "\n" if setup.command else ""
    exports = "" if setup.command else "".join(f"export {pair}\n" for pair in pairs)
    return "\n".join(filter(None, [start, exports, *(f"# add to {path}\n{t}" for path, t in setup.files.items())]))
