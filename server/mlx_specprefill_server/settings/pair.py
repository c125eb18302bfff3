"""The settings of one pair: options, environment, the pair's own values and the defaults, in this order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..pairs import Described
from .server import Settings

ONE_SHOT: dict[str, Any] = {"prefix_cache_size": 0, "densify": "off"}  # no later request would use the cache


def drop_unset(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those that a command line leaves open."""
    return {name: value for name, value in options.items() if value not in (None, (), [])}


def make_settings(pair: Described, **given: Any) -> Settings:
    """Return the settings: options first, then the environment, the pair's own values and the built-in defaults.

    Args:
        given: options by the settings' names; None or empty means not given.
    """
    options = drop_unset(given)
    known = Settings(**options).model_fields_set
    pair_says = {
        "specprefill_threshold": pair.threshold,
        "specprefill_keep_pct": pair.keep_pct,
        "rule": pair.rule,
        "estimate": False if pair.estimates == "off" else None,
        "model_alias": pair.alias,
        "template_kwargs": pair.template_kwargs,
    }
    for name, value in pair_says.items():
        if value is not None and name not in known:
            options[name] = value
    return Settings(**options)
