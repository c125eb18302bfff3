"""One model over several machines: the ranks that `mlx.launch` has started join, and follow rank 0."""

from __future__ import annotations

import logging
import math
import os
import signal
from dataclasses import replace

from mlx_specprefill import RankedEngine, Ranks, join_ranks

from ...running.process import GRACE_S
from ...settings.server import Settings

logger = logging.getLogger(__name__)

_MORE_S = 10  # seconds for rank 0 to close its engine


def join(settings: Settings) -> Ranks | None:
    """Join the processes that mlx.launch has started with this one. Return None if there are none.

    Raises:
        LoadError: a rank is missing, or has other versions or settings.
    """
    # Settings that may differ between machines: paths and memory.
    config = replace(settings.engine_config(), prefix_cache_dir=None, calibration_file=None, memory_limit=None)
    ranks = join_ranks(facts={"engine settings": str(config)})
    if ranks is not None:
        logger.info("process %d is rank %d of %d", os.getpid(), ranks.rank, ranks.size)
    return ranks


def follow(engine: RankedEngine) -> None:
    """Follow rank 0 on another rank until it ends.

    Rank 0 gets signals too, lets its requests finish, and then ends this rank. If it is gone, this rank may wait in
    MLX's ring for ever: then the system ends it.
    """
    limit_s = math.ceil(GRACE_S) + _MORE_S
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: signal.alarm(limit_s))
    engine.follow()
