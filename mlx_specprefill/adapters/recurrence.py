"""Replays recurrent layers: computes their state after the first rows of a forward, without running the model again.

A recurrent state can't be trimmed. But the output of such a layer depends only on its inputs and on the state before
the forward, and inputs of early rows don't depend on later ones. So the inputs are recorded during a forward, and the
layer's own recurrence runs again over the kept rows. mlx-lm's recurrent modules share no base class; they are listed by
name, and a model whose states and modules don't match is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from ..cache.positioned import leaves
from .scoped import Active

# Classes of mlx-lm that hold a recurrent state, as `file:class`.
RECURRENT = (
    "bailing_hybrid:LinearAttention",
    "bailing_moe_linear:LinearAttention",
    "bailing_moe_v3:BailingKDA",
    "falcon_h1:FalconH1Mixer",
    "gear:ConvKVGatedMixer",
    "granitemoehybrid:GraniteMoeHybridMamba2Mixer",
    "jamba:JambaMambaMixer",
    "kimi_k3:KimiK3DeltaAttention",
    "kimi_linear:KimiDeltaAttention",
    "lfm2:ShortConv",
    "lfm2_moe:ShortConv",
    "nemotron_h:NemotronHMamba2Mixer",
    "olmo_hybrid:GatedDeltaNet",
    "plamo2:Mamba",
    "qwen3_5:GatedDeltaNet",
    "qwen3_next:Qwen3NextGatedDeltaNet",
    "recurrent_gemma:RecurrentBlock",
)
_INPUTS = ("x", "inputs", "hidden_states", "input_states")

_calls: Active[list[RecurrentCall]] = Active()


@dataclass(frozen=True)
class RecurrentCall:
    """One call of a recurrent module: its unwrapped function, its arguments, and the state that it wrote."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cache: ArraysCache

    def replay(self, rows: int) -> None:
        """Run the call again on its first `rows` inputs. The state must be that from before the call."""
        kwargs = {name: _first(value, rows) if name in _INPUTS else value for name, value in self.kwargs.items()}
        self.call(*(_first(value, rows) if isinstance(value, mx.array) else value for value in self.args), **kwargs)


def _first(rows_of: mx.array, rows: int) -> mx.array:
    return rows_of[:, :rows]


def wrap_recurrence(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a recurrent module's `__call__` to show its arguments to the active recording."""

    @wraps(call)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _calls.value is not None:
            state = next((v for v in (*args, *kwargs.values()) if isinstance(v, ArraysCache)), None)
            if state is not None:
                _calls.value.append(RecurrentCall(call, (module, *args), kwargs, state))
        return call(module, *args, **kwargs)

    return run


@contextmanager
def record_recurrence() -> Iterator[list[RecurrentCall]]:
    """Collect the calls of recurrent modules on this thread."""
    with _calls.during([]) as calls:
        yield calls


def replay_refusal(model: nn.Module, cache: Sequence[Any]) -> str | None:
    """Return why this model's recurrent states can't be replayed; None if they can, or if there are none."""
    states = sum(isinstance(part, ArraysCache) for part in leaves(cache))
    modules = sum(_name(type(module)) in RECURRENT for module in model.modules())
    if states in (0, modules):
        return None
    return f"{states} of its layers keep a state, and {modules} of them can be replayed"


def _name(kind: type) -> str:
    return f"{kind.__module__.removeprefix('mlx_lm.models.')}:{kind.__qualname__}"
