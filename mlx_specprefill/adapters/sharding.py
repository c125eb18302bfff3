"""Shards a target over several processes with mlx-lm's own code."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import mlx.nn as nn

from ..distributed.ranks import Ranks
from ..errors import LoadError

__all__ = ["DraftPlacement", "Sharding", "check_heads", "files_digest", "shard", "sharding_of"]

Sharding = Literal["tensor", "pipeline"]
DraftPlacement = Literal["first", "sharded"]
""""first": on rank 0, which sends the importance to the others. Else each rank holds a part of every layer."""
_PART = 4096  # bytes
_PARTS = 64  # of every file


def sharding_of(model: nn.Module) -> Sharding | None:
    """Return mlx-lm's way to spread the model: every layer over all ranks, else some layers to each rank; None if
    neither.
    """
    if hasattr(model, "shard"):
        return "tensor"
    return "pipeline" if hasattr(getattr(model, "model", None), "pipeline") else None


def shard(model: nn.Module, name: str, config: dict[str, Any], group: Ranks, kind: Sharding | None = None) -> Sharding:
    """Reduce a model whose weights were not read yet to this rank's part.

    Args:
        kind: of sharding; None: `sharding_of`.

    Raises:
        LoadError: mlx-lm can't spread it over this number of ranks.
    """
    kind = kind or sharding_of(model)
    if kind is None or (kind == "tensor" and not hasattr(model, "shard")):
        ways = "shard" if kind == "tensor" else "shard or pipeline"
        raise LoadError(f"{name} can't be spread over several machines: mlx-lm can't {ways} {model.model_type}")
    try:
        if kind == "tensor":
            check_heads(name, config, group.size)
            model.shard(group.group)
        else:
            model.model.pipeline(group.group)
    except (ValueError, AssertionError, IndexError) as error:
        raise LoadError(f"{name} can't be spread over {group.size} ranks: {error}") from error
    return kind


def check_heads(name: str, config: dict[str, Any], size: int) -> None:
    """Check that head counts are divisible by the number of ranks. mlx-lm ignores the remainder.

    Raises:
        LoadError: there is a remainder.
    """
    text = config.get("text_config", config)
    for key in ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"):
        count = text.get(key)
        # A latent cache (MLA) is whole on every rank, whatever this number.
        if isinstance(count, int) and count % size and not (key == "num_key_value_heads" and "kv_lora_rank" in text):
            raise LoadError(f"{name} can't be spread over {size} ranks: its {count} {key} can't be divided by that")


def files_digest(path: Path) -> str:
    """Return a digest of a checkpoint's configuration and of samples of its weights."""
    digest = hashlib.blake2b(digest_size=16)
    files = [path] if path.is_file() else sorted([*path.glob("config.json"), *path.glob("*.safetensors")])
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as content:
            for index in range(_PARTS):
                content.seek(index * size // _PARTS)
                digest.update(content.read(_PART))
    return digest.hexdigest()
