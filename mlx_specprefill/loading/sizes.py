"""Sizes of a model that is not loaded, from its config.json and the types of its weights: window, cache, bytes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes as classes_of

from ..adapters.patches import install_patches
from .footprint import Footprint, cache_footprint
from .one_model import context_length
from .rope_names import with_old_rope_names

_PROBE = 16  # tokens of the forward
_COMPUTES = frozenset({"dbrx"})  # their forwards read values, which needs the weights
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
_UNBUILDABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, ZeroDivisionError)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model that has not been loaded.

    Attributes:
        refusal: why mlx-lm can't load it; None if it can.
        context: tokens that it was configured for.
        footprint: of a sequence, without forwards; None where it can't be known.
    """

    refusal: str | None
    context: int
    footprint: Footprint | None = None

    def cache_bytes(self, tokens: int) -> int | None:
        """Return the bytes of a sequence of `tokens` stored tokens."""
        return None if self.footprint is None else self.footprint.of_held(tokens)


def blueprint(config: Mapping[str, Any], dtype: str = "bfloat16") -> Blueprint:
    """Build the blueprint from the contents of config.json. Loads no weights and computes nothing.

    Builds mlx-lm's model and a forward over a few tokens without evaluating them: MLX knows the shapes of the cache's
    arrays.

    Args:
        dtype: of the floating-point weights as they are loaded, by which the cache is stored.
    """
    text = with_old_rope_names(config)
    context = context_length(text, None)
    try:
        model_class, arguments = classes_of(text)
    except _UNBUILDABLE as error:
        name = text.get("model_type")
        reason = f"config.json has no {error}" if name is None else f"mlx-lm has no architecture {name!r}"
        return Blueprint(reason, context)
    architecture = model_class.__module__.removeprefix("mlx_lm.models.")
    if architecture not in _COMPUTES:
        with suppress(*_UNBUILDABLE):
            return Blueprint(None, context, _build_footprint(model_class(arguments.from_dict(text)), dtype))
    return Blueprint(None, context)


def _build_footprint(model: nn.Module, dtype: str) -> Footprint:
    install_patches()
    model.set_dtype(_DTYPES.get(dtype, mx.bfloat16))
    model.eval()
    cache = make_prompt_cache(model)
    model(mx.zeros((1, _PROBE), dtype=mx.int32), cache=cache)
    return cache_footprint(cache)


def loaded_bytes(parameters: Mapping[str, int], dtype: Literal["auto", "stored"] = "auto") -> int:
    """Return the bytes of the weights once loaded.

    Args:
        parameters: how many elements of each type of safetensors the files hold.
        dtype: "auto" as in `load_pair`: the CPU backend has half precision cast to float32.
    """
    cast = dtype == "auto" and mx.default_device() == mx.Device(mx.cpu)
    sizes = _BYTES | ({"BF16": 4, "F16": 4} if cast else {})
    return sum(count * sizes.get(kind, 1) for kind, count in parameters.items())
