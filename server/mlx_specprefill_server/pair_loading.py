"""Loads a pair's models by the settings, and chooses between a draft and the target's own first layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from mlx_specprefill import (
    DraftHeads,
    DtypeName,
    Engine,
    EngineConfig,
    LoadedModels,
    ModelPair,
    RankedEngine,
    Ranks,
    calibrated_heads,
    drafts_with_draft,
    load_pair,
    with_estimates,
    with_heads,
)

from .pairs import Pair
from .settings.server import Settings

logger = logging.getLogger(__name__)

Tell = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
"""Context manager that announces a step and yields a callback(done, total); megabytes for models."""


@contextmanager
def silent(words: str) -> Iterator[Callable[[int, int], None]]:
    """Report nothing."""
    yield lambda done, total: None


def load(
    pair: Pair,
    dtype: DtypeName,
    settings: Settings | None = None,
    *,
    calibrate: bool = False,
    tell: Tell = silent,
    loaded: LoadedModels | None = None,
    ranks: Ranks | None = None,
) -> ModelPair:
    """Load the pair, with the calibrated heads of its draft where they are known.

    Without a draft, the target's own first layers score prompts, if some of them are enough.

    Args:
        dtype: "auto": the pair's own, if it has one.
        settings: settings with the folder of calibrations; None: nothing is stored.
        loaded: models of other pairs that this one can share.
        calibrate: measure unknown calibrations.
        ranks: the ranks that share the target. If each has some of its layers, only a draft model can score prompts.
    """
    names = pair.target if pair.draft in (None, "self") else f"{pair.target} and {pair.draft}"
    own = pair.draft in (None, "self")
    # A draft that may propose tokens needs all of its layers. The target's own first layers propose none.
    early = own or settings is None or not drafts_with_draft(settings.speculative)
    with tell(f"Loading {names}") as progress:
        made = load_pair(
            pair.target,
            "self" if own else pair.draft,
            draft_heads=pair.draft_heads,
            exit_early=early,
            dtype=pair.dtype if dtype == "auto" else dtype,
            loaded=loaded,
            repacked=None if settings is None else settings.beside_costs("repacked"),
            on_progress=lambda done, total: progress(done >> 20, total >> 20),
            ranks=ranks,
        )
    if pair.context is not None:
        made = replace(made, context_length=min(made.context_length, pair.context))
    if not made.has_draft:  # the target's own layers can't score if each rank has some of them
        return made
    if made.heads is None and settings is not None:
        heads = _heads(made, settings, calibrate, tell)
        made = made if heads is None else with_heads(made, heads, exit_early=early)
    if pair.draft is None and made.draft is made.target:
        return _alone(made)
    if settings is not None and not settings.estimate:
        return made
    folder = None if settings is None else settings.beside_costs("estimates")
    return with_estimates(made, None if pair.estimates in (None, "off") else Path(pair.estimates), folder)


def load_engine(
    pair: Pair,
    dtype: DtypeName,
    settings: Settings,
    config: EngineConfig,
    *,
    calibrate: bool = False,
    tell: Tell = silent,
    ranks: Ranks | None = None,
) -> Engine:
    """Return an engine for the pair, which loads on the engine's own thread. Arguments as in `load`."""

    def read(pause: Callable[[], None]) -> ModelPair:
        @contextmanager
        def telling(words: str) -> Iterator[Callable[[int, int], None]]:
            def progress(done: int, total: int) -> None:
                report(done, total)
                pause()

            with tell(words) as report:
                yield progress

        return load(pair, dtype, settings, calibrate=calibrate, tell=telling, ranks=ranks)

    return (Engine if ranks is None else RankedEngine).load(read, config)


def _alone(pair: ModelPair) -> ModelPair:
    """Return the target without a scorer, and the reason."""
    refusal = pair.sparse_refusal or "no draft model is loaded, and it takes all of the target's layers to score"
    logger.warning("%s: full prefill only: %s", pair.target_id, refusal)
    return replace(
        pair, draft=None, draft_id=None, draft_context=None, draft_config=None, heads=None, sparse_refusal=refusal
    )


def _heads(pair: ModelPair, settings: Settings, calibrate: bool, tell: Tell) -> DraftHeads | None:
    config, folder = settings.engine_config(), settings.beside_costs("heads")
    with tell("Calibrating the draft's heads, once") as progress:
        return calibrated_heads(pair, config.scoring, config.selection, folder, measure=calibrate, on_progress=progress)
