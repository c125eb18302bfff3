"""The internals of mlx and mlx-lm that the library leans on. An upgrade that moves one of them fails here, by name."""

from __future__ import annotations

import ast
import importlib
import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.models import base, ministral3, mistral4, rope_utils
from mlx_lm.models import cache as caches
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

import mlx_specprefill
from tests.support.oracle import UNBUILDABLE
from tests.support.refusals import BATCH_REFUSALS, DRAFT_REFUSALS, SPARSE_REFUSALS

MODELS = Path(mlx_lm.__file__).parent / "models"


def tokens(*values: float) -> mx.array:
    """One head, one feature: the value itself."""
    return mx.array(values, dtype=mx.float32).reshape(1, 1, -1, 1)


def test_the_versions_that_were_verified() -> None:
    assert version("mlx").startswith("0.32.")
    assert version("mlx-lm").startswith("0.32.")


# --- KVCache ---------------------------------------------------------------------------------------------------------


def test_kv_cache_masks() -> None:
    cache = KVCache()
    cache.update_and_fetch(tokens(1, 2), tokens(1, 2))
    assert cache.make_mask(3, return_array=False, window_size=None) == "causal"
    assert cache.make_mask(1, return_array=True, window_size=None) is None
    assert cache.make_mask(2, return_array=True, window_size=None).tolist() == [[True] * 3 + [False], [True] * 4]
    assert cache.make_mask(1, return_array=False, window_size=2).tolist() == [[False, True, True]]


# --- RotatingKVCache: the ring ---------------------------------------------------------------------------------------


def test_ring_masks_take_the_window_by_keyword() -> None:
    assert list(inspect.signature(RotatingKVCache.make_mask).parameters)[1:] == ["N", "window_size", "return_array"]
    cache = RotatingKVCache(4)
    assert cache.make_mask(3) == "causal"
    cache.update_and_fetch(tokens(*range(6)), tokens(*range(6)))
    assert cache.make_mask(1) is None
    assert cache.make_mask(2).shape == (2, 5)


# --- other caches ----------------------------------------------------------------------------------------------------


def test_composites_hold_their_parts_in_order() -> None:
    first, second = ArraysCache(1), KVCache()
    composite = CacheList(first, second)
    assert tuple(composite.caches) == (first, second)
    assert composite[1] is second
    assert [name for _, name in composite.state] == ["ArraysCache", "KVCache"]


def test_recurrent_caches_are_a_list_of_arrays() -> None:
    cache = ArraysCache(2)
    cache[0] = mx.ones((1, 2))
    assert cache.state[0] == [cache[0], None]
    assert not cache.is_trimmable()
    assert not hasattr(cache, "offset")


def test_the_base_class_of_caches() -> None:
    assert issubclass(KVCache, caches._BaseCache)
    assert "from_state" in vars(caches._BaseCache)


# --- attention and rotation are looked up when they are called -------------------------------------------------------


def test_masks_come_from_the_cache_by_keyword() -> None:
    calls = []

    class Spy:
        def make_mask(self, N: int, **kwargs: Any) -> str:
            calls.append((N, kwargs))
            return "mine"

    assert base.create_attention_mask(mx.zeros((1, 3, 2)), Spy(), window_size=5, return_array=True) == "mine"
    assert calls == [(3, {"return_array": True, "window_size": 5})]


def test_attention_passes_what_capture_reads_by_keyword(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def spy(q: mx.array, k: mx.array, v: mx.array, **kwargs: Any) -> mx.array:
        seen.update(kwargs)
        return q

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", spy)
    x = mx.zeros((1, 1, 1, 4))
    base.scaled_dot_product_attention(x, x, x, None, scale=0.5, mask=None, sinks=None)
    assert seen == {"scale": 0.5, "mask": None, "sinks": None}


def test_quantized_attention_ends_in_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = QuantizedKVCache(group_size=32, bits=8)
    x = mx.ones((1, 1, 3, 32))
    keys, values = cache.update_and_fetch(x, x)
    softmax, seen = mx.softmax, []
    monkeypatch.setattr(mx, "softmax", lambda a, **kwargs: seen.append(a.shape) or softmax(a, **kwargs))
    base.scaled_dot_product_attention(mx.ones((1, 2, 1, 32)), keys, values, cache, scale=1.0, mask=None)
    assert seen == [(1, 1, 2, 1, 3)]


def calls_to(name: str) -> dict[str, list[ast.Call]]:
    """Calls whose last name is `name`, by file of mlx_lm/models."""
    found: dict[str, list[ast.Call]] = {}
    for path in sorted(MODELS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rsplit(".", 1)[-1] == name:
                found.setdefault(path.stem, []).append(node)
    return found


@pytest.mark.extended
def test_nobody_holds_the_primitives_by_another_name() -> None:
    """`rope = mx.fast.rope` or `from mlx.core.fast import rope` would go around the wrappers."""
    names = {"rope", "scaled_dot_product_attention", "softmax"}
    for path in sorted(MODELS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx.core"):
                assert not names & {alias.name for alias in node.names}, path.name
            if isinstance(node, ast.Assign):
                assert ast.unparse(node.value) not in {f"mx.fast.{name}" for name in names} | {"mx.softmax"}, path.name


def imported(source: str) -> set[str]:
    """Every part of the names that a module imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {part for alias in node.names for part in alias.name.split(".")}
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.rpartition(".")[2])
    return names


def rotating_kernels() -> set[str]:
    """Files of mlx-lm whose own Metal kernels rotate, and the functions in them."""
    names: set[str] = set()
    for path in MODELS.parent.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "metal_kernel(" in source and "cos(" in source:
            functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
            names |= {path.stem} | functions
    return names


@pytest.mark.parametrize(
    "source",
    [
        "from ..kernels import norm_add_norm, qk_norm_rope",
        "from mlx_lm.kernels.qk_norm_rope import qk_norm_rope as rotate",
        "from ..kernels.qk_norm_rope import *",
        "import mlx_lm.kernels.qk_norm_rope",
    ],
)
def test_an_import_of_a_kernel_that_rotates_is_found(source: str) -> None:
    assert imported(source) & rotating_kernels()


@pytest.mark.extended
def test_models_with_kernels_that_rotate_are_refused() -> None:
    """On Metal alone the wrapped `mx.fast.rope` would see nothing of these rotations."""
    rotating = rotating_kernels()
    sources = {path.stem: path.read_text(encoding="utf-8") for path in MODELS.glob("*.py")}
    found = {name for name, source in sources.items() if name in rotating or imported(source) & rotating}
    assert "muse_spark" in found
    for refusals in (SPARSE_REFUSALS, DRAFT_REFUSALS, BATCH_REFUSALS):
        assert found <= refusals.keys()


@pytest.mark.extended
def test_take_along_axis_is_told_its_axis() -> None:
    """Without one it flattens both arrays."""
    for path in Path(mlx_specprefill.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "mx.take_along_axis":
                assert "axis" in {word.arg for word in node.keywords}, f"{path.name}: {ast.unparse(node)}"


@pytest.mark.extended
def test_the_kernel_behind_rope_gets_its_offset_by_keyword() -> None:
    calls = [call for found in calls_to("rope").values() for call in found if "mx.fast" in ast.unparse(call.func)]
    assert len(calls) >= 10
    for call in calls:
        assert len(call.args) <= 2 or "offset" in {word.arg for word in call.keywords}, ast.unparse(call)


def test_nn_rope_ends_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(mx.fast, "rope", lambda x, dims, **kwargs: seen.append(kwargs["offset"]) or x)
    nn.RoPE(4)(mx.zeros((1, 1, 2, 4)), offset=7)
    assert seen == [7]


ROPES = [kind for _, kind in inspect.getmembers(rope_utils, inspect.isclass) if issubclass(kind, nn.Module)]


@pytest.mark.parametrize("kind", [nn.RoPE, *ROPES])
def test_every_rope_class_calls_the_kernel_by_its_full_name(kind: type[nn.Module]) -> None:
    assert "mx.fast.rope(" in inspect.getsource(kind.__call__)


def test_the_kernel_takes_one_offset_per_row() -> None:
    x = mx.random.normal((2, 1, 3, 8), key=mx.random.key(0))
    rope = nn.RoPE(8)
    both = rope(x, offset=mx.array([3, 50]))
    assert mx.array_equal(both, mx.concatenate([rope(x[:1], offset=3), rope(x[1:], offset=50)]))


# --- what the adapters replace ---------------------------------------------------------------------------------------


def test_attention_scale_of_ministral3() -> None:
    scale = ministral3._get_llama_4_attn_scale
    assert list(inspect.signature(scale).parameters) == ["size", "offset", "beta", "max_position_embeddings"]
    assert scale(3, 5, 0.1, 4).shape == (3, 1)
    assert hasattr(mistral4, "_get_llama_4_attn_scale")
    for module in (ministral3, mistral4):
        assert "= _get_llama_4_attn_scale(" in inspect.getsource(module)


def test_dynamic_ntk_needs_one_integer() -> None:
    rope = rope_utils.DynamicNTKScalingRoPE(8, 16, False, 10000.0, 2.0)
    assert {"dims", "max_position_embeddings", "traditional", "base", "factor"} <= set(vars(rope)) | set(rope)
    assert list(inspect.signature(type(rope).__call__).parameters) == ["self", "x", "offset"]


# --- models ----------------------------------------------------------------------------------------------------------


def test_olmo_still_ends_the_process_when_imported() -> None:
    """The reason why it is left out; once it imports, it can be verified like the others."""
    assert "olmo" in UNBUILDABLE
    with pytest.raises(SystemExit):
        importlib.import_module("mlx_lm.models.olmo")
