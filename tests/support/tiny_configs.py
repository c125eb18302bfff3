"""The table of tiny random models, by name. It imports no model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Tiny:
    """A tiny random model: a file of `mlx_lm/models` and a configuration for it."""

    name: str
    architecture: str
    config: dict[str, Any]


@cache
def tiny_models() -> dict[str, Tiny]:
    """Every configuration by name; `llama+window` is a variant of `llama`."""
    path = Path(__file__).parents[1] / "data" / "tiny_model_configs.json"
    entries = json.loads(path.read_text(encoding="utf-8"))
    return {name: Tiny(name, entry["architecture"], entry["config"]) for name, entry in entries.items()}
