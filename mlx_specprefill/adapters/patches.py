"""Every function of mlx and mlx-lm that is wrapped at run time.

`loading` installs the wrappers after a pair's models are built. Each is installed once per process and stays. Ordinary
calls pass through unchanged. A wrapper acts only on calls of this library: it takes one position per token, or it
reports to a recording that is active on the calling thread. No model is changed per request.

One change is not in the table, because it wraps nothing: `cache/positioned` adds the names of its two classes to
`mlx_lm.models.cache`, where composite caches look them up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from .capture import wrap_attention, wrap_softmax
from .mtp import wrap_hidden
from .recurrence import RECURRENT, wrap_recurrence
from .rope import wrap_attention_scale, wrap_dynamic_ntk, wrap_rope

__all__ = ["PATCHES", "Patch", "install_patches"]

Function = Callable[..., Any]
_MARK = "mlx_specprefill_patch"


@dataclass(frozen=True, slots=True)
class Patch:
    """One wrapper.

    Attributes:
        names: wrapped functions, as `module:attribute.path`; wrapped once the module is imported.
        wrap: makes the wrapper of a function.
        reason: the feature that needs it.
        tested_in: the test that compares its effect with a reference.
    """

    names: tuple[str, ...]
    wrap: Callable[[Function], Function]
    reason: str
    tested_in: str


PATCHES = (
    Patch(
        ("mlx.core:fast.rope",),
        wrap_rope,
        "sparse prefill: one position per token; a shift for quantised KV caches",
        "tests/adapters/test_rope.py",
    ),
    Patch(
        ("mlx.core:fast.scaled_dot_product_attention",),
        wrap_attention,
        "scorers read the draft's attention, retrieval caches the target's queries",
        "tests/adapters/test_capture.py",
    ),
    Patch(
        ("mlx.core:softmax",),
        wrap_softmax,
        "the same for attention written by hand (gemma2, phi3small, quantised KV caches)",
        "tests/adapters/test_capture.py",
    ),
    Patch(
        ("mlx_lm.models.rope_utils:DynamicNTKScalingRoPE.__call__",),
        wrap_dynamic_ntk,
        "its base depends on the end of the sequence: the last position of a sparse prefill, one end per batch row",
        "tests/adapters/test_rope.py",
    ),
    Patch(
        (
            "mlx_lm.models.ministral3:_get_llama_4_attn_scale",
            "mlx_lm.models.mistral4:_get_llama_4_attn_scale",
        ),
        wrap_attention_scale,
        "queries are scaled by their position, which is not the slot after a sparse prefill",
        "tests/properties/test_sparse_equals_masked.py",
    ),
    Patch(
        tuple(f"mlx_lm.models.{name}.__call__" for name in RECURRENT),
        wrap_recurrence,
        "rollback of rejected tokens replays a recurrent state from the inputs of its layer",
        "tests/speculative/test_rollback.py",
    ),
    Patch(
        ("mlx_lm.models.qwen3_5:Qwen3_5TextModel.__call__",),
        wrap_hidden,
        "MTP heads propose from the target's final hidden states",
        "tests/adapters/test_mtp.py",
    ),
)


def install_patches() -> None:
    """Wrap every function of the table whose module is imported and that is not wrapped yet."""
    for patch in PATCHES:
        for name in patch.names:
            module, _, path = name.partition(":")
            if module in sys.modules:
                *outer, attribute = path.split(".")
                _install(reduce(getattr, outer, sys.modules[module]), attribute, patch.wrap)


def _install(holder: Any, attribute: str, wrap: Callable[[Function], Function]) -> None:
    function: Any = getattr(holder, attribute)
    if hasattr(function, _MARK):
        return
    wrapper: Any = wrap(function)
    wrapper.__wrapped__ = function
    setattr(wrapper, _MARK, True)
    setattr(holder, attribute, wrapper)
