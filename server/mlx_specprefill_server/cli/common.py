"""Shared code of the commands: one-line errors, the pair, a running server. It imports no MLX before it is used."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer
from huggingface_hub import constants
from pydantic import ValidationError
from rich.console import Console

import mlx_specprefill
from mlx_specprefill import (
    BLAS,
    SpecPrefillError,
    is_repository_id,
    resolve_model_path,
)

from ..monitoring.logs import configure_logging
from ..pairs import MissingPairError, PackageError, Pair, PairsError, find_pair
from ..settings.server import LogLevel, Settings, unknown_variables, what_is_wrong
from .options import PairOptions

USAGE_ERROR = 2  # the exit status of errors that the user can fix
FAILED = 1
LOCAL = ("127.0.0.1", "localhost", "::1")
_TIMEOUT_S = 30.0  # seconds; a machine that is reading prompts answers slowly
_DEFAULT_PAIR, _SUBSTITUTE = "smollm2", "demo"


class OptionError(SpecPrefillError):
    """Options that can't be combined, or one that is missing."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Show a user's mistake in one line. Every other error keeps its traceback."""
    try:
        yield
    except (SpecPrefillError, PackageError, PairsError) as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except ValidationError as error:
        message = what_is_wrong(error)
    else:
        return
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(USAGE_ERROR)


def ask_server(url: str, path: str, key: str | None, field: str) -> dict[str, Any]:
    """Return a running server's answer.

    Args:
        url: its address, with or without /v1.
        field: one that the answer has.

    Raises:
        OptionError: it does not answer, refuses, or is another program.
    """
    address = url.rstrip("/").removesuffix("/v1") + path
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        is_here = urlsplit(address).hostname in LOCAL  # elsewhere the environment's proxies are asked
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({} if is_here else None))
        with opener.open(urllib.request.Request(address, headers=headers), timeout=_TIMEOUT_S) as response:
            answer = json.load(response)
            if field not in answer:
                raise KeyError(field)
            return dict(answer)
    except urllib.error.HTTPError as error:
        raise OptionError(f"{address}: {_error_message(error)}") from error
    except (OSError, HTTPException, ValueError, KeyError, TypeError, OverflowError) as error:
        hint = "start the server first, or give its address (--url) and key (--api-key)"
        raise OptionError(f"{address} does not answer as this project's server does: {error}; {hint}") from error


def _error_message(error: urllib.error.HTTPError) -> str:
    try:
        return f"status {error.code}: {json.load(error)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}"


def begin(level: LogLevel) -> None:
    configure_logging(level)
    note_environment()


def note_environment() -> None:
    """Say on standard error how this machine could be faster, and which variables are misspelled."""
    if BLAS.notice:
        typer.echo(f"note: {BLAS.notice}", err=True)
    for sentence in unknown_variables():
        typer.echo(f"note: {sentence}", err=True)


def notes() -> Console:
    """Return the console for everything but the answer."""
    return Console(stderr=True)


def choose(options: PairOptions) -> Pair:
    """Return the pair that the options name. The default is the real model where it is installed, else the bundled one.

    A draft of `self` makes the target of a named pair its own draft.

    Raises:
        PairsError: no such pair, or an unreadable file.
        OptionError: options that exclude each other, or a file of pairs without a name.
    """
    draft = options.draft
    if options.pair is not None and options.target is not None:
        raise OptionError("--pair and --target exclude each other: a pair names its target")
    if options.target is not None:
        return Pair(target=options.target, draft=draft)
    if draft not in (None, "self"):
        raise OptionError("--draft needs --target, unless it is self")
    if options.pair is None and options.pairs_file is not None:
        raise OptionError("--pairs-file needs --pair")
    pair = _default_pair() if options.pair is None else find_pair(options.pair, options.pairs_file)
    if draft not in (None, pair.draft):  # trained heads and a map belong to one draft
        return pair.model_copy(update={"draft": draft, "draft_heads": None, "estimates": None})
    return pair


def choose_here(options: PairOptions) -> Pair:
    """Return the pair that the options name, as `choose`. Refuse a model that is not here and can't be fetched."""
    pair = choose(options)
    for name in (pair.target, pair.draft):
        if name not in (None, "self"):
            _check_model(str(name))
    return pair


def _check_model(name: str) -> None:
    """Raise an OptionError unless the model is on this machine or may be fetched."""
    path = resolve_model_path(name)
    if path is None and is_repository_id(name):
        if constants.HF_HUB_OFFLINE:
            raise OptionError(
                f"{name} is not on this machine, and HF_HUB_OFFLINE is set: unset it to fetch the model, "
                "or give the path of its folder or GGUF file. `mlx-specprefill list` shows what is here"
            )
    elif path is None or not path.exists():
        form = "" if path else ", and an id on Hugging Face has two parts, PUBLISHER/NAME"
        raise OptionError(f"{name}: there is no such folder or file{form}. `mlx-specprefill list` shows what is here")


def _default_pair() -> Pair:
    try:
        return find_pair(_DEFAULT_PAIR)
    except MissingPairError as error:
        missing = error
    try:
        substitute = find_pair(_SUBSTITUTE)
    except MissingPairError:  # an installation without the repository's models
        raise missing from None
    typer.echo(f"note: {missing}. Taking {_SUBSTITUTE} instead, a toy for tests.", err=True)
    return substitute


def usable_memory(given: str | None = None) -> int | None:
    """Return the bytes for weights, requests and caches: the option, the setting or the recommendation."""
    options: dict[str, Any] = {} if given is None else {"memory_limit": given}
    return Settings(**options).memory_limit or mlx_specprefill.machine().memory_limit


def duration(seconds: float) -> str:
    """Return the duration in words."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "1 s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def read_text(path: Path) -> str:
    """Return the file's text, or standard input's for `-`. Undecodable bytes become replacement characters."""
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    return data.decode("utf-8", errors="replace")
