"""What a model will be and need, from its config.json: no weights are read and nothing is computed.

mlx-lm's own model is built, and its forward over a few tokens, but neither is evaluated: MLX knows the shapes of the
cache's arrays all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import _get_classes as classes_of

from ...adapters.checkpoint import context_length
from ...adapters.patches import install_patches
from ...adapters.registry import adapter_for
from ...shapes import prefill_macs
from .footprint import cache_footprint

__all__ = ["Blueprint", "blueprint", "loaded_bytes", "predicted_gain"]

_PROBE = 16  # tokens of the forward
_STAGED = 0.25  # of the layers, where the first ones score: how many it takes is known after calibration only
_COMPUTES = frozenset({"dbrx"})  # their forwards look at values, so that weights would have to exist
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
_HALVES = ("BF16", "F16")
_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
_UNBUILDABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, ZeroDivisionError)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model that has not been loaded.

    Attributes:
        architecture: the file of `mlx_lm/models`.
        refusal: why mlx-lm can't load it; None if it can.
        sparse_refusal, draft_refusal, staged_refusal: as of `Adapter`.
        context: tokens that it was configured for.
        per_token, constant: bytes of KV cache per token and per sequence; None where they can't be known.
        parameters: how many weights it has; `expert_parameters`: of those, in its experts.
    """

    architecture: str
    refusal: str | None
    sparse_refusal: str | None
    draft_refusal: str | None
    staged_refusal: str | None
    context: int
    per_token: int | None
    constant: int | None
    parameters: int | None
    expert_parameters: int | None
    _config: Mapping[str, Any]
    _model: nn.Module | None

    def cache_bytes(self, tokens: int) -> int | None:
        """Of a sequence of that many stored tokens."""
        if self.per_token is None or self.constant is None:
            return None
        return self.per_token * tokens + self.constant

    def macs(self, tokens: int) -> int | None:
        """Multiply-accumulates of a prefill of that many tokens."""
        if self._model is None:
            return None
        try:
            return prefill_macs(self._model, dict(self._config), tokens)
        except _UNBUILDABLE:
            return None


def blueprint(config: Mapping[str, Any], dtype: str = "bfloat16", *, sizes: bool = True) -> Blueprint:
    """From what config.json holds.

    Args:
        dtype: of the floating-point weights as they are loaded, by which the cache is stored.
        sizes: False: only what is known of the architecture.
    """
    text = dict(config)
    context = context_length(text, _Silent())
    try:
        model_class, arguments = classes_of(text)
    except _UNBUILDABLE as error:
        name = str(text.get("model_type") or "unknown")
        reason = f"mlx-lm has no architecture {name!r}" if "model_type" in text else f"config.json has no {error}"
        return Blueprint(name, reason, reason, reason, reason, context, None, None, None, None, text, None)
    architecture = model_class.__module__.removeprefix("mlx_lm.models.")
    adapter = adapter_for(architecture)
    refusals = (None, adapter.sparse_refusal, adapter.draft_refusal, adapter.staged_refusal)
    if not sizes:
        return Blueprint(architecture, *refusals, context, None, None, None, None, text, None)
    try:
        model = _built(model_class(arguments.from_dict(text)), dtype)
        known = None if architecture in _COMPUTES else _cache_sizes(model)
    except _UNBUILDABLE:
        return Blueprint(architecture, *refusals, context, None, None, None, None, text, None)
    per_token, constant = known or (None, None)
    return Blueprint(architecture, *refusals, context, per_token, constant, *_parameters(model), text, model)


class _Silent:
    """A tokenizer that says nothing about lengths."""


def _built(model: nn.Module, dtype: str) -> nn.Module:
    install_patches()
    model.set_dtype(_DTYPES.get(dtype, mx.bfloat16))
    model.eval()
    return model


def _cache_sizes(model: nn.Module) -> tuple[int, int]:
    cache = make_prompt_cache(model)
    model(mx.zeros((1, _PROBE), dtype=mx.int32), cache=cache)
    return cache_footprint(cache)


def _parameters(model: nn.Module) -> tuple[int, int]:
    """All of them, and those of experts."""
    experts = [module for _, module in model.named_modules() if isinstance(module, SwitchLinear)]
    counts = (sum(int(array.size) for _, array in tree_flatten(part.parameters())) for part in (model, *experts))
    whole, *parts = counts
    return whole, sum(parts)


def loaded_bytes(parameters: Mapping[str, int], dtype: Literal["auto", "stored"] = "auto") -> tuple[int, str]:
    """What weights take once they are loaded, and the name of their floating-point type.

    Args:
        parameters: how many elements of each type of safetensors the files hold.
        dtype: "auto" as in `load_pair`: the CPU backend has half precision cast to float32.
    """
    cast = dtype == "auto" and mx.default_device() == mx.Device(mx.cpu)
    total = sum(count * (4 if cast and kind in _HALVES else _BYTES.get(kind, 1)) for kind, count in parameters.items())
    halves = {kind: parameters.get(kind, 0) for kind in _HALVES}
    if cast or not any(halves.values()):
        return total, "float32"
    return total, "bfloat16" if halves["BF16"] >= halves["F16"] else "float16"


def predicted_gain(target: Blueprint, draft: Blueprint | None, tokens: int, keep: Fraction) -> float | None:
    """How many times sooner the first token comes with a sparse prefill, if every operation took the same time.

    Counted, not measured: `calibrate` measures. None where it can't be counted, or the two can't prefill sparsely.

    Args:
        draft: None: the target's own first layers, a quarter of them.
    """
    full, kept = target.macs(tokens), target.macs(max(1, round(float(keep) * tokens)))
    refusal = target.sparse_refusal or (target.staged_refusal if draft is None else draft.draft_refusal)
    if full is None or kept is None or refusal is not None:
        return None
    if draft is None:
        return full / (_STAGED * full + (1 - _STAGED) * kept)
    scored = draft.macs(tokens)
    return None if scored is None else full / (scored + kept)
