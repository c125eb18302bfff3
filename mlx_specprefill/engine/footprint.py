"""The memory of a sequence: measured on the loaded model, or predicted from config.json. MLX thread only."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import _get_classes as classes_of

from ..adapters.depth import FirstLayers
from ..adapters.mtp import MTPHead
from ..adapters.patches import install_patches
from ..adapters.staged import StagedModel
from ..cache.positioned import fill, leaves
from ..reading import context_length
from .sequence import Need

_SHORT = 128  # tokens of the first measuring forward
_FAR, _DEPTH = 32, 2048  # tokens of the second one, and cached tokens before them
_SHARE_OF_WORKING_SET = 0.9  # of the device's recommendation: MLX frees its cached memory above .95 of it
_SHARE_OF_RAM = 0.8  # of physical memory, if the device recommends no working set


def default_limit() -> int | None:
    """Return the bytes that weights, sequences and caches may use together."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended:
        return int(_SHARE_OF_WORKING_SET * int(recommended))
    ram = physical_memory()
    return int(_SHARE_OF_RAM * ram) if ram else None


def weight_bytes(model: nn.Module, beside: nn.Module | None = None) -> int:
    """Return the bytes of the loaded parameters that `beside` does not share: a draft can be a part of its target."""
    counted = {} if beside is None else _arrays(beside)
    return sum(int(array.nbytes) for key, array in _arrays(model).items() if key not in counted)


def weights_by_array(*models: nn.Module | None) -> dict[int, int]:
    """Return the bytes of the parameters of all these models by identity, each array once."""
    found = {key: array for model in models if model is not None for key, array in _arrays(model).items()}
    return {key: int(array.nbytes) for key, array in found.items()}


def _arrays(model: nn.Module) -> dict[int, mx.array]:
    """Return the model's arrays by identity, including layers that a draft does not run."""
    held = [model, model.whole] if isinstance(model, FirstLayers) else [model]
    return {id(array): array for part in held for _, array in tree_flatten(part.parameters())}


def measure_footprint(model: nn.Module | None, context: int | None = None) -> Footprint:
    """Measure the cache's arrays, and the allocator's peak in two short forwards: at the start, and behind many tokens.

    The additional memory per token of the second forward is that of the attention scores. It depends on the device, the
    heads' size and MLX. Windows stay empty: full attention needs more than they do.

    Args:
        context: positions that the model supports; None: as many as are measured.
    """
    if model is None:
        return Footprint(0, 0)
    cache = list(make_prompt_cache(model))
    _peak(model, cache, 2)  # makes the cache's arrays, with room for the next forward
    per_row = _peak(model, cache, _SHORT) / _SHORT
    depth = min(_DEPTH, (context or _DEPTH + _FAR) - _FAR)
    if depth <= 2 * _SHORT:
        return Footprint(*cache_footprint(cache), per_row)
    fill(cache, depth)
    more = max(0.0, _peak(model, cache, _FAR) / _FAR - per_row)
    per_pair = more / (depth + _FAR - _SHORT)
    return Footprint(*cache_footprint(cache), max(0.0, per_row - per_pair * _SHORT), per_pair)


def _peak(model: nn.Module, cache: list[Any], tokens: int) -> int:
    """Return the peak bytes of a forward of `tokens` tokens, above those in use before."""
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model(mx.zeros((1, tokens), dtype=mx.int32), cache=cache)
    mx.eval([part.state for part in cache])
    return int(mx.get_peak_memory()) - before


def cache_footprint(cache: list[Any]) -> tuple[int, int]:
    """Return the bytes of a filled cache per token, and its constant bytes. Reads no array."""
    per_token = constant = 0
    for part in leaves(cache):
        if isinstance(part, ArraysCache):
            constant += int(part.nbytes)
        elif isinstance(part, RotatingKVCache):
            constant += _bytes_per_token(part) * int(part.max_size)
        elif getattr(part, "keys", None) is not None:
            per_token += _bytes_per_token(part)
    return per_token, constant


def hidden_bytes(model: StagedModel) -> int:
    """Return the bytes per token that the first layers pass on. Computes nothing."""
    return int(model.lower(mx.zeros((1, 1), dtype=mx.int32), cache=model.lower.make_cache()).nbytes)


def measure_head_footprint(head: MTPHead | str) -> Footprint:
    """Measure the cache entries of an MTP head. Computes a few at a time, beside larger forwards."""
    if isinstance(head, str):
        return Footprint(0, 0)
    cache = KVCache()
    mx.eval(head(mx.zeros((1, 1, head.hidden_size), head.dtype), mx.zeros((1, 1), dtype=mx.int32), cache))
    return Footprint(_bytes_per_token(cache), 0)


def _bytes_per_token(part: KVCache | RotatingKVCache) -> int:
    slots = int(part.keys.shape[2])
    return int(part.keys.nbytes + part.values.nbytes) // max(slots, 1)


# Queries times keys of one prefill forward. A larger forward may exceed the time that a GPU's watchdog allows.
MOST_PAIRS = 2048 * 32768


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one sequence in one model, measured at start-up.

    Attributes:
        per_token: bytes of KV cache per stored token.
        constant: bytes per sequence whatever its length (recurrent state, full windows).
        per_row: bytes that a forward needs for each of its tokens.
        per_pair: bytes that it needs per token and key, for attention scores that no fused kernel avoids.
    """

    per_token: int
    constant: int
    per_row: float = 0.0
    per_pair: float = 0.0

    def of_held(self, tokens: int) -> int:
        """Return the bytes of a sequence of `tokens` stored tokens, between two forwards."""
        return self.per_token * tokens + self.constant

    def working(self, tokens: int, step: int) -> int:
        """Return the bytes of the largest forward when `tokens` tokens are prefilled in forwards of at most `step`."""
        rows = min(step, tokens)
        return round(self.per_row * rows + self.per_pair * min(rows * tokens, MOST_PAIRS))


class Admission:
    """Reservations against a limit that also covers the weights and the prefix cache.

    Args:
        limit: bytes for everything; None switches admission control off.
        weights: bytes in constant use.
        cached: bytes held by the prefix cache right now.
        reclaim: frees at least that many bytes of the prefix cache if it can.
        elsewhere: how much of so many bytes is missing because of other engines; `reclaim_elsewhere` frees it if
            it can.
    """

    def __init__(
        self,
        limit: int | None,
        weights: int,
        cached: Callable[[], int] = lambda: 0,
        reclaim: Callable[[int], None] = lambda _: None,
        elsewhere: Callable[[int], int] = lambda _: 0,
        reclaim_elsewhere: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.limit = limit
        self.weights = weights
        self._cached = cached
        self._reclaim = reclaim
        self._elsewhere = elsewhere
        self._reclaim_elsewhere = reclaim_elsewhere
        self._reserved: dict[int, Need] = {}

    @property
    def reserved(self) -> int:
        return sum(need.held for need in tuple(self._reserved.values())) + self.working

    @property
    def working(self) -> int:
        """Return the bytes of the largest forward that a running job may need."""
        return max((need.working for need in tuple(self._reserved.values())), default=0)

    def held(self, uid: int) -> int:
        """Return the bytes reserved for one job, between two forwards."""
        return self._reserved.get(uid, Need()).held

    def can_ever(self, need: Need) -> bool:
        """Return whether the need fits with no other job running and an empty prefix cache."""
        return self.limit is None or self.weights + need.total <= self.limit

    def fits(self, need: Need) -> bool:
        """Return whether the bytes are free now."""
        return self._missing(need) <= 0 and self._elsewhere(self._more(need)) <= 0

    def reserve(self, uid: int, need: Need) -> bool:
        """Take the bytes if they are free, evicting from the prefix cache first."""
        if (missing := self._missing(need)) > 0:
            self._reclaim(missing)
        if self._elsewhere(more := self._more(need)) > 0:
            self._reclaim_elsewhere(more)
        return self.reserve_free(uid, need)

    def reserve_free(self, uid: int, need: Need) -> bool:
        """Take the bytes if they are free now. Evicts nothing."""
        if not self.fits(need):
            return False
        self._reserved[uid] = need
        return True

    def _more(self, need: Need) -> int:
        """Return the bytes that this need adds to the reservations."""
        return need.held + max(0, need.working - self.working)

    def _missing(self, need: Need) -> int:
        if self.limit is None:
            return 0
        return self.weights + self.reserved + self._more(need) + self._cached() - self.limit

    def release(self, uid: int) -> None:
        self._reserved.pop(uid, None)


def physical_memory() -> int | None:
    """Return the bytes of RAM; None if the system does not report them."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


_PROBE = 16  # tokens of the forward
_COMPUTES = frozenset({"dbrx"})  # their forwards read values, which needs the weights
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
_HALVES = ("BF16", "F16")
_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
_UNBUILDABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, ZeroDivisionError)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model that has not been loaded.

    Attributes:
        refusal: why mlx-lm can't load it; None if it can.
        context: tokens that it was configured for.
        per_token, constant: bytes of KV cache per token and per sequence; None where they can't be known.
    """

    refusal: str | None
    context: int
    per_token: int | None = None
    constant: int | None = None

    def cache_bytes(self, tokens: int) -> int | None:
        """Return the bytes of a sequence of `tokens` stored tokens."""
        if self.per_token is None or self.constant is None:
            return None
        return self.per_token * tokens + self.constant


def blueprint(config: Mapping[str, Any], dtype: str = "bfloat16") -> Blueprint:
    """Build the blueprint from the contents of config.json. Loads no weights and computes nothing.

    Builds mlx-lm's model and a forward over a few tokens without evaluating them: MLX knows the shapes of the cache's
    arrays.

    Args:
        dtype: of the floating-point weights as they are loaded, by which the cache is stored.
    """
    text = dict(config)
    context = context_length(text, _Silent())
    try:
        model_class, arguments = classes_of(text)
    except _UNBUILDABLE as error:
        name = text.get("model_type")
        reason = f"config.json has no {error}" if name is None else f"mlx-lm has no architecture {name!r}"
        return Blueprint(reason, context)
    architecture = model_class.__module__.removeprefix("mlx_lm.models.")
    known: tuple[int, int] | tuple[()] = ()
    if architecture not in _COMPUTES:
        with suppress(*_UNBUILDABLE):
            known = _cache_sizes(_build(model_class(arguments.from_dict(text)), dtype))
    return Blueprint(None, context, *known)


class _Silent:
    """Tokenizer that logs nothing about lengths."""


def _build(model: nn.Module, dtype: str) -> nn.Module:
    install_patches()
    model.set_dtype(_DTYPES.get(dtype, mx.bfloat16))
    model.eval()
    return model


def _cache_sizes(model: nn.Module) -> tuple[int, int]:
    cache = make_prompt_cache(model)
    model(mx.zeros((1, _PROBE), dtype=mx.int32), cache=cache)
    return cache_footprint(cache)


def loaded_bytes(parameters: Mapping[str, int], dtype: Literal["auto", "stored"] = "auto") -> tuple[int, str]:
    """Return the bytes of the weights once loaded, and the name of their floating-point type.

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
