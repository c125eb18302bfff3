"""RoPE's settings in config.json under the names that mlx-lm's models read.

transformers 5 writes them all to `rope_parameters`: one mapping for all layers, or one for each type of layers
(`full_attention`, `sliding_attention`; DeepSeek's `main`, `compress`). Most models of mlx-lm read `rope_theta` and
`rope_scaling`, and fall back to a default base without a word.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from itertools import chain
from types import ModuleType
from typing import Any

from ..errors import LoadError

log = logging.getLogger(__name__)
_NEW = "rope_parameters"
_MAIN = ("full_attention", "main")  # the type of layers whose settings have the plain names
_BASES = ("rope_theta", "rotary_emb_base")
_OTHER_BASES = {  # of the other types of layers
    "sliding_attention": ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta"),
    "compress": ("compress_rope_theta",),
}
_SHARES = ("partial_rotary_factor", "rotary_pct")
_ALIASES = {"su": "longrope"}


def with_old_rope_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json with RoPE's settings under the old names too, those of nested ones included.

    As in transformers, `rope_parameters` counts more than an old name, but `rope_scaling` counts more than it.
    """
    named = {
        name: with_old_rope_names(value) if isinstance(value, dict) and name not in (_NEW, "rope_scaling") else value
        for name, value in config.items()
    }
    if isinstance(scaling := named.get("rope_scaling"), dict):
        named["rope_scaling"] = _with_both_types(scaling)
    stated = named.get(_NEW)
    if not isinstance(stated, dict) or not stated:
        return named
    found = _old_names(stated)
    if named.get("rope_scaling"):
        found = {name: value for name, value in found.items() if named.get(name) is None}
    if named.get("original_max_position_embeddings") is not None:
        found.pop("original_max_position_embeddings", None)
    if "rotary_dim" not in named and named.get("head_dim") is not None and _SHARES[0] in found:
        found["rotary_dim"] = round(named["head_dim"] * found[_SHARES[0]])
    return named | found


def _old_names(stated: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {kind: settings for kind, settings in stated.items() if isinstance(settings, dict)}
    if not kinds:
        return _names_of(stated)
    found = _names_of(_main_of(kinds))
    for kind, names in _OTHER_BASES.items():
        if (base := kinds.get(kind, {}).get("rope_theta")) is not None:
            found |= dict.fromkeys(names, base)
    if "compress" in kinds:
        found["rope_scaling"] = _scaling(kinds["compress"])
    return found


def _main_of(kinds: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    return next((kinds[kind] for kind in _MAIN if kind in kinds), next(iter(kinds.values())))


def _names_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return one type of layers' settings by their old names."""
    found: dict[str, Any] = {"rope_scaling": _scaling(settings)}
    if (base := settings.get("rope_theta")) is not None:
        found |= dict.fromkeys(_BASES, base)
    if (share := settings.get("partial_rotary_factor")) is not None:
        found |= dict.fromkeys(_SHARES, share)
    if (trained := settings.get("original_max_position_embeddings")) is not None:
        found["original_max_position_embeddings"] = trained
    return found


def _scaling(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `rope_scaling`; None if positions are not scaled."""
    named = _with_both_types({name: value for name, value in settings.items() if name != "rope_theta"})
    return None if named.get("type", "default") == "default" else named


def _with_both_types(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_scaling` with its type by both names: some models read only one of them."""
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind is None:
        return dict(scaling)
    return {**scaling, **dict.fromkeys(("type", "rope_type"), _ALIASES.get(kind, kind))}


def check_rope_names(config: Mapping[str, Any], model: ModuleType) -> None:
    """Check that a model reads what `with_old_rope_names` wrote. Warn where positions are scaled and it doesn't.

    Args:
        model: the file of `mlx_lm/models`.

    Raises:
        LoadError: types of layers have settings of their own, which it can't have.
    """
    read = _names_read_by(model)
    name = model.__name__.rpartition(".")[2]
    for part in _parts(config):
        if _NEW in read and part.get(_NEW):
            continue
        if kind := _inexpressible(part.get(_NEW) or {}, read):
            raise LoadError(
                f"rope_parameters in config.json has other settings for {kind}, which mlx-lm's {name} does not read"
            )
        if part.get("rope_scaling") and "rope_scaling" not in read:
            log.warning("config.json scales RoPE (%s), but mlx-lm's %s does not", part["rope_scaling"], name)


def _inexpressible(stated: Mapping[str, Any], read: set[str]) -> str | None:
    """Return a type of layers whose settings have no old name that is read."""
    kinds = {kind: settings for kind, settings in stated.items() if isinstance(settings, dict)}
    main = _main_of(kinds) if kinds else {}
    for kind, settings in kinds.items():
        own_base = settings.get("rope_theta") != main.get("rope_theta")
        own_scaling = kind != "compress" and settings is not main and _scaling(settings) is not None
        if own_scaling or (own_base and not read.intersection(_OTHER_BASES.get(kind, ()))):
            return kind
    return None


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the configuration and the nested ones of language models."""
    yield config
    if isinstance(text := config.get("text_config"), dict):
        yield text


def _names_read_by(model: ModuleType) -> set[str]:
    """Return the settings of the model's file and of the files that it imports."""
    used = [part for part in vars(model).values() if isinstance(part, ModuleType) and ".models." in part.__name__]
    classes = chain.from_iterable(vars(part).values() for part in (model, *used))
    described = [each for each in classes if isinstance(each, type) and dataclasses.is_dataclass(each)]
    return {field.name for each in described for field in dataclasses.fields(each)}
