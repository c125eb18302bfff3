"""Speeds of a target's prefill by version of the software, so that an update that made it slower is found."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from .. import __version__
from .._files import read_object, replace_text

log = logging.getLogger(__name__)
TOKENS = 8192  # of the prompt whose speed is kept
_SLOWER = 0.8  # share of the earlier speed


class Slowdown(NamedTuple):
    """A prompt of `TOKENS` tokens that is read more slowly than before. Speeds are in tokens per second."""

    model: str
    earlier: str
    before: float
    now: float


def speeds_file(costs: Path) -> Path:
    """Return the file of speeds that belongs to a file of costs."""
    return costs.with_name("speeds.json")


def keep_speed(file: Path, model: str, speed: float) -> None:
    """Keep a model's tokens per second under the installed versions, as the latest.

    Args:
        model: the model, dtype and device, which have to be equal in a comparison.
    """
    stored = read_object(file)
    versions = {"mlx-specprefill": __version__, **{name: version(name) for name in ("mlx", "mlx-lm")}}
    here = ", ".join(f"{name} {number}" for name, number in versions.items())
    known = stored.get(model)
    others = {name: each for name, each in known.items() if name != here} if isinstance(known, dict) else {}
    try:
        replace_text(file, json.dumps(stored | {model: others | {here: round(speed, 1)}}, indent=1))
    except OSError as error:
        log.warning("the measured speed could not be kept: %s", error)


def slower_models(file: Path) -> Iterator[Slowdown]:
    """Yield the models whose latest version reads over 20 % slower than the one before."""
    for model, known in read_object(file).items():
        speeds = list(known.items())[-2:] if isinstance(known, dict) else []
        if len(speeds) == 2 and all(isinstance(speed, int | float) for _, speed in speeds):
            (earlier, before), (_, now) = speeds
            if now < _SLOWER * before:
                yield Slowdown(model, earlier, before, now)
