"""Loading of a pair for the commands. They download missing models and announce each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlx_specprefill import Engine, EngineConfig, ModelPair, Ranks

from .. import pair_loading
from ..pairs import Pair
from ..settings import Settings
from .common import notes
from .options import DtypeName
from .pulling import fetch_missing

__all__ = ["load", "load_engine"]


def load(pair: Pair, dtype: DtypeName, settings: Settings | None = None, *, calibrate: bool = False) -> ModelPair:
    """Load a pair as `pair_loading.load` does, and announce each step on standard error.

    A missing repository is fetched as `pull` does.

    Raises:
        OptionError: the disk or the memory has no room for the missing files.
        HubError: it can't be fetched.
    """
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

    Raises:
        OptionError, HubError: as in `load`.
    """
    if ranks is None:
        fetch_missing(pair)
    return pair_loading.load_engine(pair, dtype, settings, config, calibrate=calibrate, tell=_progress, ranks=ranks)


@contextmanager
def _progress(words: str) -> Iterator[Callable[[int, int], None]]:
    """Return a context manager that shows a step and its progress."""
    with notes().status(words) as status:
        unit = " MB" if words.startswith("Loading ") else ""
        yield lambda done, total: status.update(f"{words}: {done} of {total}{unit}" if total else words)
