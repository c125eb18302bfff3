"""Rotations at original positions are the dense sequence's own, bit for bit; shifts stay where they belong."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import deepseek_v2, hunyuan, hunyuan_v1_dense, rope_utils
from mlx_lm.models.rope_utils import initialize_rope

from mlx_specprefill.adapters.rotation import PositionMappedRoPE, adjust_offsets

Rope = Callable[..., mx.array]
DIMS, LENGTH = 16, 300
KEPT = np.array([0, 1, 2, 9, 17, 18, 40, 41, 42, 43, 129, 255, 256, 299], dtype=np.int32)
OTHER = np.array([3, 4, 8, 9, 17, 28, 40, 51, 62, 73, 129, 130, 256, 290], dtype=np.int32)

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5}
LONG = {"type": "longrope", "original_max_position_embeddings": 64, "short_factor": 1.0}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"type": "default"},
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "llama3": {**LLAMA3, "high_freq_factor": 4.0},
    "yarn": {"type": "yarn", **YARN},
    "deepseek_yarn": {"type": "deepseek_yarn", **YARN},
    "telechat3-yarn": {"type": "telechat3-yarn", **YARN},
    "longrope": {**LONG, "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0]},
    "proportional": {"type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
    "mrope": {"type": "mrope", "mrope_section": [2, 3, 3]},
}


def ropes() -> dict[str, Rope]:
    """Every RoPE module of mlx and mlx-lm that models build, over 16 dimensions."""
    made: dict[str, Rope] = {}
    for traditional in (False, True):
        suffix = "-traditional" if traditional else ""
        for name, scaling in SCALINGS.items():
            made[name + suffix] = initialize_rope(DIMS, 10000.0, traditional, scaling, max_position_embeddings=512)
        made["nn" + suffix] = nn.RoPE(DIMS, traditional=traditional)
        made["nn-scaled" + suffix] = nn.RoPE(DIMS, traditional=traditional, scale=0.25)
    factors = [1.0 + i for i in range(DIMS // 2)]
    made["su"] = rope_utils.SuScaledRoPE(DIMS, original_max_position_embeddings=64, long_factor=factors)
    made["yarn-mscale"] = rope_utils.YarnRoPE(DIMS, scaling_factor=4.0, original_max_position_embeddings=64, mscale=2)
    made["hunyuan"] = hunyuan.DynamicNTKAlphaRoPE(DIMS, scaling_alpha=100.0)
    made["hunyuan_v1_dense"] = hunyuan_v1_dense.DynamicNTKAlphaRoPE(DIMS, scaling_alpha=100.0)
    made["deepseek_v2"] = deepseek_v2.DeepseekV2YarnRotaryEmbedding(
        DIMS, scaling_factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.5
    )
    return made


def keys(batch: int, width: int = DIMS, dtype: mx.Dtype = mx.float32) -> mx.array:
    """As models build them: (B, L, H, D) transposed to (B, H, L, D)."""
    rng = np.random.default_rng(batch)
    return mx.array(rng.standard_normal((batch, LENGTH, 3, width))).astype(dtype).transpose(0, 2, 1, 3)


def unwrapped() -> Any:
    wrapper: Any = mx.fast.rope
    return wrapper.__wrapped__


def same_bits(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and bool(mx.array_equal(a, b))


def test_the_list_holds_every_rope_class_of_rope_utils() -> None:
    defined = {kind for _, kind in inspect.getmembers(rope_utils, inspect.isclass) if issubclass(kind, nn.Module)}
    assert defined <= {type(rope) for rope in ropes().values()}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "width"),
    # deepseek_v2's rotates whatever width it is given
    [(name, width) for name in ropes() for width in (DIMS, DIMS + 8) if width == DIMS or name != "deepseek_v2"],
)
def test_rotated_keys_equal_the_dense_ones_bit_for_bit(name: str, width: int, dtype: mx.Dtype) -> None:
    rope, x = ropes()[name], keys(1, width, dtype)
    dense = rope(x, offset=0)
    sparse = rope(x[..., mx.array(KEPT), :], offset=mx.array(KEPT)[None])
    assert same_bits(sparse, dense[..., mx.array(KEPT), :])


@pytest.mark.parametrize("name", list(ropes()))
def test_rows_of_a_batch_have_positions_of_their_own(name: str) -> None:
    rope, x = ropes()[name], keys(2)
    dense = rope(x, offset=0)
    first, second = mx.array(KEPT), mx.array(OTHER)
    rows = mx.stack([x[0][:, first], x[1][:, second]])
    sparse = rope(rows, offset=mx.stack([first, second]))
    assert same_bits(sparse, mx.stack([dense[0][:, first], dense[1][:, second]]))


def test_inputs_without_a_head_axis() -> None:
    x, rope = keys(1)[:, 0], nn.RoPE(DIMS)
    kept = mx.array(KEPT)
    assert same_bits(rope(x[:, kept], offset=kept[None]), rope(x)[:, kept])


def test_far_positions() -> None:
    x, rope = keys(1)[..., :4, :], nn.RoPE(DIMS)
    far = [7, 99_999, 524_287, 1_000_000]
    single = mx.concatenate([rope(x[..., i : i + 1, :], offset=p) for i, p in enumerate(far)], axis=-2)
    assert same_bits(rope(x, offset=mx.array([far])), single)


@pytest.mark.parametrize("offset", [0, 5, np.array([5]), np.array([5, 11])], ids=["0", "int", "(1,)", "(B,)"])
def test_ordinary_offsets_pass_through_untouched(offset: Any) -> None:
    x = keys(2)
    offset = mx.array(offset) if isinstance(offset, np.ndarray) else offset
    inner = unwrapped()
    arguments = plain(offset)
    assert same_bits(mx.fast.rope(x, DIMS, **arguments), inner(x, DIMS, **arguments))


def test_too_few_or_too_many_positions_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 positions for 300 tokens"):
        nn.RoPE(DIMS)(keys(1), offset=mx.array([[1, 2, 3]]))


def test_the_wrapper_is_installed_once() -> None:
    assert isinstance(mx.fast.rope, PositionMappedRoPE)
    assert mx.fast.rope.rope is unwrapped()
    assert not isinstance(unwrapped(), PositionMappedRoPE)


def test_a_shift_without_the_wrapper_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "rope", unwrapped())
    with pytest.raises(RuntimeError, match="not wrapped"), adjust_offsets([5]):
        pass


# --- dynamic NTK: the base depends on where the sequence ends --------------------------------------------------------


@pytest.mark.parametrize("limit", [64, 299, 300, 512])
def test_dynamic_ntk_takes_its_base_from_the_last_position(limit: int) -> None:
    rope = rope_utils.DynamicNTKScalingRoPE(DIMS, limit, False, 10000.0, 2.0)
    x = keys(1)
    dense = rope(x, offset=0)  # ends at position 299, as the last kept token does
    assert same_bits(rope(x[..., mx.array(KEPT), :], offset=mx.array(KEPT)[None]), dense[..., mx.array(KEPT), :])


def test_dynamic_ntk_is_inert_for_integers() -> None:
    rope = rope_utils.DynamicNTKScalingRoPE(DIMS, 64, True, 10000.0, 2.0)
    x = keys(1)
    call: Any = type(rope).__call__
    assert same_bits(rope(x, offset=33), call.__wrapped__(rope, x, 33))


# --- shifts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nn", "nn-scaled-traditional", "llama3", "yarn", "longrope", "proportional"])
@pytest.mark.parametrize("offset", [4, np.array([4, 9])], ids=["int", "(B,)"])
def test_shifts_per_row_equal_ordinary_offsets(name: str, offset: Any) -> None:
    rope, x, shifts = ropes()[name], keys(2), [100, 0]
    base = [offset, offset] if isinstance(offset, int) else offset.tolist()
    expected = mx.concatenate([rope(x[b : b + 1], offset=base[b] + shifts[b]) for b in range(2)])
    with adjust_offsets(shifts):
        shifted = rope(x, offset=offset if isinstance(offset, int) else mx.array(offset))
    assert np.allclose(np.array(shifted), np.array(expected), atol=1e-6)


def test_a_single_shift_keeps_an_integer_offset() -> None:
    x, rope = keys(1), nn.RoPE(DIMS)
    with adjust_offsets([57]):
        assert same_bits(rope(x, offset=3), unwrapped()(x, DIMS, **plain(offset=60)))


def plain(offset: Any) -> dict[str, Any]:
    return {"traditional": False, "base": 10000.0, "scale": 1.0, "offset": offset}


def test_shifts_end_with_their_block_even_after_an_error() -> None:
    x, rope = keys(1), nn.RoPE(DIMS)
    before = rope(x, offset=3)
    with pytest.raises(KeyError), adjust_offsets([57]):
        raise KeyError
    assert same_bits(rope(x, offset=3), before)


def test_shifts_of_one_thread_are_unseen_by_another() -> None:
    inside, checked = threading.Event(), threading.Event()
    found: list[np.ndarray] = []
    x, rope = keys(1), nn.RoPE(DIMS)
    mx.eval(x)
    unshifted = np.array(rope(x, offset=3))

    def elsewhere() -> None:
        inside.wait(10)
        found.append(np.array(rope(x, offset=3)))
        checked.set()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    with adjust_offsets([57]):
        shifted = np.array(rope(x, offset=3))
        inside.set()
        checked.wait(10)
    thread.join(10)
    assert np.array_equal(found[0], unshifted)
    assert not np.allclose(shifted, unshifted)
