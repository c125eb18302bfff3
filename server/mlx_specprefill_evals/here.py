"""The work of `mlx-specprefill eval` with a pair that is loaded here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_specprefill import DtypeName, Engine, EngineConfig
from mlx_specprefill_evals.arms import Arm
from mlx_specprefill_evals.command import Options, Predict, evaluate
from mlx_specprefill_evals.errors import NothingToDoError
from mlx_specprefill_evals.local import LocalModel, examination
from mlx_specprefill_server.cli.loading import load
from mlx_specprefill_server.pairs import Pair
from mlx_specprefill_server.settings.pair import make_settings


def evaluate_here(options: Options, chosen: Pair, dtype: DtypeName, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return the report on a pair.

    Raises:
        NothingToDoError: an arm is to estimate nothing where no arm does.
    """
    settings = make_settings(chosen)
    loaded = load(chosen, dtype, settings, calibrate=True)
    if loaded.estimates is None and (same := [arm.kind for arm in options.arms if arm.kind.endswith("absent")]):
        raise NothingToDoError(
            f"arm {same[0]} would measure another arm again: nothing is estimated here (MLX_SPECPREFILL_ESTIMATE)"
        )
    with Engine(loaded, examination()) as engine:
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
