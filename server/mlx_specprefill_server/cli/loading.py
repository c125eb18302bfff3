"""Loading for the commands: missing files are fetched, and each step is announced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from mlx_specprefill import DtypeName, Engine, EngineConfig, ModelPair, Ranks

from .. import pair_loading
from ..pairs import Pair
from ..settings.server import Settings
from .common import duration, notes
from .pull import fetch_missing

_LONG_S = 3.0  # seconds of a step that is worth a line


def load(pair: Pair, dtype: DtypeName, settings: Settings | None = None, *, calibrate: bool = False) -> ModelPair:
    """Load a pair as `pair_loading.load` does, after `fetch_missing`, and announce each step on standard error."""
    fetch_missing(pair)
    return pair_loading.load(pair, dtype, settings, calibrate=calibrate, tell=_progress)


def load_engine(
    pair: Pair,
    dtype: DtypeName,
    settings: Settings,
    config: EngineConfig,
    *,
    calibrate: bool = False,
    ranks: Ranks | None = None,
) -> Engine:
    """Load a pair into an engine as `pair_loading.load_engine` does, and announce each step.

    On several machines mlx-lm fetches missing files, because the memory that a model takes of each one is not known
    before.
    """
    if ranks is None:
        fetch_missing(pair)
    engine = pair_loading.load_engine(pair, dtype, settings, config, calibrate=calibrate, tell=_progress, ranks=ranks)
    if ranks is None:
        with _progress("Measuring what the models cost"):
            engine.start()
    return engine


@contextmanager
def _progress(words: str) -> Iterator[Callable[[int, int], None]]:
    """Return a context manager that shows a step and its progress, and a line if it took long."""
    began = time.monotonic()
    with notes().status(words) as status:
        unit = " MB" if words.startswith("Loading ") else ""
        yield lambda done, total: status.update(f"{words}: {done} of {total}{unit}" if total else words)
    if (took := time.monotonic() - began) > _LONG_S:
        typer.echo(f"{words}: {duration(took)}", err=True)
