"""What the commands have in common: errors in one line, settings by precedence, loading, the prompt."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError
from rich.console import Console

from mlx_specprefill import (
    BLAS,
    DraftHeads,
    ModelPair,
    SpecPrefillError,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    calibrated_heads,
    keep_share,
    load_pair,
    max_loss,
    with_calibrated_shares,
    with_heads,
)

from ..monitoring.logs import configure_logging
from ..packages import PackageError
from ..pairs import MissingPairError, Pair, PairsError, find_pair
from ..prompting.conversation import conversation
from ..prompting.prompt import Prompt, PromptBuilder
from ..settings import LogLevel, Settings
from .options import DtypeName

__all__ = [
    "FAILED",
    "ONE_SHOT",
    "USAGE_ERROR",
    "OptionError",
    "begin",
    "choose",
    "load",
    "make_prompt",
    "make_settings",
    "note_blas",
    "notes",
    "one_line_errors",
    "options_of",
    "read_text",
]

USAGE_ERROR = 2  # the exit status of everything the user can put right
FAILED = 1
ONE_SHOT: dict[str, Any] = {"prefix_cache_size": 0, "densify": False}  # no next request will use what is kept
_DEFAULT_PAIR, _SUBSTITUTE = "smollm2", "demo"
_ONE_SHOT_THRESHOLD = SpecPrefillPolicy().threshold  # measuring takes longer than one request saves


class OptionError(SpecPrefillError):
    """Options that don't go together, or one that is missing."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What the user did wrong, in one line; everything else keeps its traceback."""
    try:
        yield
    except (SpecPrefillError, PackageError, PairsError) as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
    else:
        return
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(USAGE_ERROR)


def begin(level: LogLevel) -> None:
    configure_logging(level)
    note_blas()


def note_blas() -> None:
    """Say on standard error what would make this machine faster."""
    if BLAS.notice:
        typer.echo(f"note: {BLAS.notice}", err=True)


def notes() -> Console:
    """Everything that is not the answer."""
    return Console(stderr=True)


def choose(
    name: str | None,
    pairs_file: Path | None,
    target: str | None,
    draft: str | None,
    draft_layers: int | None = None,
    draft_heads: str | None = None,
) -> Pair:
    """The pair that the options mean; without options the real model where it is installed, else the bundled one.

    A named pair can be given another depth of its draft or other heads on it, or itself as the draft.

    Raises:
        PairsError: no such pair, or an unreadable file.
        OptionError: a draft without a target, or a file of pairs without a name.
    """
    if target is not None:
        return Pair(target=target, draft=draft, draft_layers=draft_layers, draft_heads=draft_heads)
    if draft not in (None, "self"):
        raise OptionError("--draft needs --target, unless it is self")
    if name is None and pairs_file is not None:
        raise OptionError("--pairs-file needs --pair")
    found = _default_pair() if name is None else find_pair(name, pairs_file)
    # Heads fit one depth: all three change together.
    changed = {"draft_layers": draft_layers, "draft_heads": draft_heads, "heads": None}
    if draft is not None:
        return found.model_copy(update={"draft": draft, **changed})
    return found if draft_layers is None and draft_heads is None else found.model_copy(update=changed)


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


def make_settings(pair: Pair, *, one_shot: bool = False, **given: Any) -> Settings:
    """Options first, then the environment, then the pair's own values, then the built-in defaults.

    Args:
        given: by the settings' names; None or empty: not given.
    """
    options = {name: value for name, value in given.items() if value not in (None, (), [])}
    known = Settings(**options).model_fields_set
    pair_says = {
        "specprefill_threshold": _ONE_SHOT_THRESHOLD if one_shot and pair.threshold is None else pair.threshold,
        "specprefill_keep_pct": pair.keep_pct,
        "model_alias": pair.alias,
        "model_origin": pair.origin,
        "model_licence": pair.licence,
    }
    for name, value in pair_says.items():
        if value is not None and name not in known:
            options[name] = value
    return Settings(**options)


def options_of(enabled: bool | None, keep: str | None, loss: str | None = None) -> SpecPrefillOptions:
    """What one request asks for."""
    return SpecPrefillOptions(
        enabled,
        None if keep is None else keep_share(keep, "--keep-pct"),
        max_loss=None if loss is None else max_loss(loss, "--max-loss"),
    )


def load(pair: Pair, dtype: DtypeName, settings: Settings | None = None, *, calibrate: bool = False) -> ModelPair:
    """The pair in memory, with the calibrated heads of its draft where they are known.

    Args:
        settings: where calibrations are kept; None: nowhere.
        calibrate: measure them where they are not known.
    """
    names = pair.target if pair.draft in (None, "self") else f"{pair.target} and {pair.draft}"
    heads = None if pair.heads is None else Path(pair.heads)
    # A draft that may have to propose tokens needs all of its layers.
    early = settings is None or settings.speculative == "off"
    with notes().status(f"Loading {names}"):
        loaded = load_pair(
            pair.target,
            pair.draft,
            draft_layers=pair.draft_layers,
            draft_heads=pair.draft_heads,
            heads=heads,
            exit_early=early,
            dtype=dtype,
        )
    if loaded.heads is None and settings is not None and pair.draft_layers is None:
        found = _heads(loaded, settings, calibrate)
        loaded = loaded if found is None else with_heads(loaded, found, exit_early=early)
    return loaded if settings is None else _with_shares(loaded, settings, calibrate)


def _with_shares(pair: ModelPair, settings: Settings, calibrate: bool) -> ModelPair:
    """What the draft loses when shares are chosen per prompt; measured only where the server's own are."""
    config, measure = settings.engine_config(), calibrate and settings.specprefill_keep_pct == "auto"
    with _progress("Calibrating how much to keep, once") as tell:
        return with_calibrated_shares(
            pair, config.scoring, config.selection, settings.heads_folder, measure=measure, on_progress=tell
        )


def _heads(pair: ModelPair, settings: Settings, calibrate: bool) -> DraftHeads | None:
    config = settings.engine_config()
    with _progress("Calibrating the draft's heads, once") as tell:
        return calibrated_heads(
            pair, config.scoring, config.selection, settings.heads_folder, measure=calibrate, on_progress=tell
        )


@contextmanager
def _progress(words: str) -> Iterator[Callable[[int, int], None]]:
    """Says what is done, and how far it is, while it lasts."""
    with notes().status(words) as status:
        yield lambda done, total: status.update(f"{words}: {done} of {total}")


def read_text(path: Path) -> str:
    """The file's text, or standard input's for `-`; undecodable bytes become replacement characters."""
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    return data.decode("utf-8", errors="replace")


def make_prompt(pair: ModelPair, text: str, question: str | None, raw: bool) -> Prompt:
    """The text, with a question after it, as one user message or as it is."""
    whole = text if question is None else f"{text.rstrip()}\n\n{question}"
    builder = PromptBuilder(pair.tokenizer)
    work = builder.raw(whole) if raw else builder.chat(conversation([{"role": "user", "content": whole}]))
    return asyncio.run(work)
