"""The work of `mlx-specprefill eval` with a pair that is loaded here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_specprefill import DtypeName, Engine, EngineConfig, SelectionConfig
from mlx_specprefill_evals.arms import Arm
from mlx_specprefill_evals.command import Options, Predict, evaluate
from mlx_specprefill_evals.local import LocalModel, examination
from mlx_specprefill_server.cli.loading import load
from mlx_specprefill_server.pairs import Pair
from mlx_specprefill_server.settings.pair import make_settings


def evaluate_here(
    options: Options,
    chosen: Pair,
    dtype: DtypeName,
    chunk_size: int | None,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Return the report on a pair.

    Args:
        chunk_size: of the library's rule; None: its own.
    """
    selection = None if chunk_size is None else SelectionConfig(chunk_size=chunk_size)
    settings = make_settings(chosen)
    loaded = load(chosen, dtype, settings, calibrate=True)
    with Engine(loaded, examination(selection)) as engine:
        return evaluate(options, LocalModel(engine), tell, _predict(engine, settings.engine_config()))


def _predict(engine: Engine, config: EngineConfig) -> Predict:
    """Return a function from prompt tokens and arm to the seconds of a prefill, as the engine predicts them."""

    def seconds(tokens: int, arm: Arm) -> float:
        share = config.policy.keep_pct if arm.keep is None else arm.keep
        kept = max(1, round(share * tokens))
        if arm.kind == "full":
            return engine.predict(tokens, kept).full_ms / 1e3
        return (engine.predict(tokens, kept).sparse_ms if arm.asks_draft else engine.predict(kept, kept).full_ms) / 1e3

    return seconds
