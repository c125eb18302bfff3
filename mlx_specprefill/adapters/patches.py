"""Every function of mlx and mlx-lm that is wrapped at run time.

`loading` installs the wrappers after a pair's models are built. Each is installed once per process and stays. Ordinary
calls pass through unchanged. A wrapper acts only on calls of this library: it takes one position per token, or it
reports to a recording that is active on the calling thread. No model is changed per request.

One change is not in the table, because it wraps nothing: `cache/positioned` adds the names of its two classes to
`mlx_lm.models.cache`, where composite caches look them up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from .capture import wrap_attention, wrap_softmax
from .recurrence import RECURRENT, wrap_recurrence
from .rotation import PositionMappedRoPE, wrap_attention_scale, wrap_dynamic_ntk
from .row_attention import wrap_rows
from .window import wrap_window

Function = Callable[..., Any]
_MARK = "mlx_specprefill_patch"

PATCHES: Mapping[str, Callable[[Function], Function]] = {
    "mlx.core:fast.rope": PositionMappedRoPE,
    "mlx.core:fast.scaled_dot_product_attention": lambda attention: wrap_rows(wrap_attention(wrap_window(attention))),
    "mlx.core:softmax": wrap_softmax,
    "mlx_lm.models.rope_utils:DynamicNTKScalingRoPE.__call__": wrap_dynamic_ntk,
    "mlx_lm.models.ministral3:_get_llama_4_attn_scale": wrap_attention_scale,
    "mlx_lm.models.mistral4:_get_llama_4_attn_scale": wrap_attention_scale,
    **{f"mlx_lm.models.{name}.__call__": wrap_recurrence for name in RECURRENT},
}
"""The wrapper of each function, `module:attribute.path`. Reasons and tests are in docs/development/architecture.md."""


def install_patches() -> None:
    """Wrap every function of the table whose module is imported and that is not wrapped yet."""
    for name, wrap in PATCHES.items():
        module, _, path = name.partition(":")
        if module in sys.modules:
            *outer, attribute = path.split(".")
            _install(reduce(getattr, outer, sys.modules[module]), attribute, wrap)


def _install(holder: Any, attribute: str, wrap: Callable[[Function], Function]) -> None:
    function: Any = getattr(holder, attribute)
    if hasattr(function, _MARK):
        return
    wrapper: Any = wrap(function)
    wrapper.__wrapped__ = function
    setattr(wrapper, _MARK, True)
    setattr(holder, attribute, wrapper)
