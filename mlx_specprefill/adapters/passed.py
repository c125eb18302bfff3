"""Remembers which models passed the probe, so that later starts need not repeat its forwards.

That a model follows positions is a fact about its weights, its configuration, the code that runs and the device. A
digest of all these names it: where one has changed, the probe runs again. A refusal is never kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import models

from .. import __version__
from .._files import read_object, replace_text
from ..cache.prefix.identity import model_identity

log = logging.getLogger(__name__)
_MOST = 64  # models in the file, the latest
_OURS = Path(__file__).parent.parent
_OF_MODELS = (_OURS / "adapters", _OURS / "cache", Path(models.__path__[0]))  # folders of code that a forward runs


class PassedChecks:
    """The checks that a model has passed.

    Args:
        file: keeps them between starts; None: every check runs.
        source: state of the files that the model was read from; None: every check runs.
        config: the model's.
    """

    def __init__(
        self, file: Path | None = None, source: str | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        self._file = None if source is None else file
        self._source, self._config = source, config or {}

    def run(self, name: str, model: nn.Module, check: Callable[[], str | None]) -> str | None:
        """Return why the model fails a check; None if it passes now, or did before as it is.

        Args:
            name: of the check, with all on which its result depends beside the model.
        """
        if self._file is None:
            return check()
        digest = _digest(f"{name}\0{self._source}", model, self._config)
        if digest in read_object(self._file):
            return None
        refusal = check()
        if refusal is None:
            _keep(self._file, digest)
        return refusal


NONE_PASSED: PassedChecks = PassedChecks()


def _keep(file: Path, digest: str) -> None:
    known = [*read_object(file), digest]
    try:
        replace_text(file, json.dumps(dict.fromkeys(known[-_MOST:], True), indent=1))
    except OSError as error:
        log.warning("the probe is repeated at the next start: %s", error)


def _digest(name: str, model: nn.Module, config: Mapping[str, Any]) -> str:
    calls = {kind.__call__.__code__: f"{kind.__module__}.{kind.__qualname__}" for kind in map(type, model.modules())}
    code = {Path(call.co_filename) for call in calls}.union(*(folder.rglob("*.py") for folder in _OF_MODELS))
    where = sorted(f"{kind} {call.co_firstlineno}" for call, kind in calls.items())
    digest = hashlib.blake2b(digest_size=16)
    for part in (name, model_identity(model, config), repr(model), *where, *_machine()):
        digest.update(f"{part}\0".encode())
    for file in sorted(code):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _machine() -> Iterator[str]:
    """Yield what computes: versions, the files of MLX, the device and its settings."""
    yield f"{__version__} {version('mlx')} {version('mlx-lm')}"
    for file in sorted(Path(mx.__file__).parent.rglob("*")):
        if file.suffix in (".so", ".dylib", ".metallib"):
            yield f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}"
    device = mx.device_info()
    yield f"{platform.platform()} {mx.default_device()} {device.get('architecture')} {device.get('device_name')}"
    yield str(sorted((name, value) for name, value in os.environ.items() if name.startswith("MLX_")))
