"""Half precision as a GPU has it: operations compute in float32, and their results are rounded.

The CPU backend lacks some operations in half precision, and rounds within others.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

HALVES = {"bf16": mx.bfloat16, "fp16": mx.float16}


def rounded(model: nn.Module, half: mx.Dtype) -> nn.Module:
    """Return the model with every module's results rounded to `half`; its logits are of that type."""
    parts: dict[int, nn.Module] = {}
    twin = _rounded(model, half, parts)
    call = type(twin).__call__

    def logits(self: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        return call(self, *args, **kwargs).astype(half)

    twin.__class__ = type(type(model).__name__, (type(twin),), _named(logits, type(model)))
    return twin


def _rounded(value: Any, half: mx.Dtype, parts: dict[int, nn.Module]) -> Any:
    if isinstance(value, list):
        return [_rounded(part, half, parts) for part in value]
    if not isinstance(value, nn.Module):
        return value
    if id(value) not in parts:
        kind, twin = type(value), copy.copy(value)
        parts[id(value)] = twin
        dict.update(twin, {name: _rounded(part, half, parts) for name, part in value.items()})
        twin.__class__ = type(kind.__name__, (kind,), _methods(kind, half))
    return parts[id(value)]


def _methods(kind: type[nn.Module], half: mx.Dtype) -> dict[str, Any]:
    def of(name: str) -> Any:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _round(getattr(kind, name)(self, *args, **kwargs), half)

        return method

    names = [name for name in ("__call__", "as_linear") if hasattr(kind, name)]
    return {name: of(name) for name in names} | {"__module__": kind.__module__}


def _named(call: Any, kind: type[nn.Module]) -> dict[str, Any]:
    return {"__call__": call, "__module__": kind.__module__}


def _round(result: Any, half: mx.Dtype) -> Any:
    if isinstance(result, mx.array):
        return result.astype(half).astype(mx.float32) if result.dtype == mx.float32 else result
    return type(result)(_round(part, half) for part in result) if type(result) in (tuple, list) else result
