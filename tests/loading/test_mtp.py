"""MTP heads in a checkpoint's files: every layout gives the head that was written, and what is wrong is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from mlx_specprefill import load_pair
from mlx_specprefill.adapters.mtp import MTPHead, normalise
from mlx_specprefill.errors import Refused
from tests.support.oracle import build
from tests.support.tiny import save_checkpoint, tiny_head, tiny_model

Tensors = dict[str, mx.array]


def head_tensors(head: MTPHead, prefix: str = "mtp.") -> Tensors:
    return {f"{prefix}{name}": array for name, array in nn.utils.tree_flatten(head.layers.parameters())}


def raw(tensors: Mapping[str, mx.array]) -> Tensors:
    """As the original checkpoints store norms: minus one."""
    return {name: array - 1.0 if array.ndim == 1 else array for name, array in tensors.items()}


def write(folder: Path, tensors: Tensors, file: str = "model.safetensors") -> None:
    """Add tensors to one of a checkpoint's files."""
    path = folder / file
    stored: Tensors = dict(mx.load(str(path))) if path.is_file() else {}
    mx.save_safetensors(str(path), {name: mx.array(array) for name, array in (stored | tensors).items()})


def shard(folder: Path, head: Tensors) -> None:
    """Three files and an index; the head is spread over two of them."""
    whole: Tensors = dict(mx.load(str(folder / "model.safetensors"))) | head
    (folder / "model.safetensors").unlink()
    names, placed = sorted(whole), dict[Any, Any]()
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        mx.save_safetensors(str(folder / file), {name: whole[name] for name in names[number::3]})
        placed |= dict.fromkeys(names[number::3], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def outputs(head: MTPHead) -> Any:
    mx.random.seed(0)
    hidden = mx.random.normal((1, 6, head.layers.norm.weight.size))
    return np.array(head.logits(head(hidden, mx.array([[3, 4, 5, 6, 7, 8]]), KVCache())))


def loaded(folder: Path) -> MTPHead:
    head = load_pair(folder).own_parts["mtp"]
    assert isinstance(head, MTPHead), head
    return head


@pytest.mark.parametrize("prefix", ["mtp.", "language_model.mtp.", "model.mtp."])
@pytest.mark.parametrize("layout", ["one file", "sharded", "beside", "raw norms"])
def test_what_was_written_is_loaded(tmp_path: Path, layout: str, prefix: str) -> None:
    folder = save_checkpoint(tmp_path / "m", "qwen3_5", 1)
    expected = tiny_head(tiny_model("qwen3_5", 1))
    tensors = head_tensors(expected, prefix)
    if layout == "sharded":
        shard(folder, tensors)
    else:
        file = "mtp.safetensors" if layout == "beside" else "model.safetensors"
        write(folder, raw(tensors) if layout == "raw norms" else tensors, file)
    np.testing.assert_allclose(outputs(loaded(folder)), outputs(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_head_stays_quantised(tmp_path: Path, bits: int) -> None:
    """Some of its matrices packed, with the group size and width that their shapes tell."""
    wide = {"text_config": {**text_config("qwen3_5"), "hidden_size": 64}}
    folder = save_checkpoint(tmp_path / "m", "qwen3_5", 1, **wide)
    expected = tiny_head(tiny_model("qwen3_5", 1, **wide))
    nn.quantize(expected.layers, 32, bits, class_predicate=lambda path, m: hasattr(m, "to_quantized") and path != "fc")
    write(folder, head_tensors(expected))
    head = loaded(folder)
    assert isinstance(head.layers.layers[0].mlp.up_proj, nn.QuantizedLinear)
    assert head.layers.layers[0].mlp.up_proj.bits == bits
    assert not isinstance(head.layers.fc, nn.QuantizedLinear)
    np.testing.assert_allclose(outputs(head), outputs(expected), rtol=1e-4, atol=1e-4)


def text_config(name: str) -> dict[str, Any]:
    args = tiny_model(name).language_model.args
    return {key: value for key, value in vars(args).items() if key != "rope_scaling"}


@pytest.mark.parametrize("layout", ["joined", "single", "stacked"])
def test_experts_in_every_layout(layout: str) -> None:
    """Gate and up projection in one tensor, one tensor per expert, or mlx-lm's own stacks."""
    expected = dict(nn.utils.tree_flatten(tiny_head(build("qwen3_5_moe")).layers.parameters()))
    base = "layers.0.mlp.switch_mlp."
    stacks = {name.removeprefix(base): array for name, array in expected.items() if name.startswith(base)}
    written = {name: array for name, array in expected.items() if not name.startswith(base)}
    experts = "layers.0.mlp.experts"
    if layout == "stacked":
        written = dict(expected)
    elif layout == "joined":
        both = [stacks["gate_proj.weight"], stacks["up_proj.weight"]]
        written |= {f"{experts}.gate_up_proj": mx.concatenate(both, axis=1)}
        written |= {f"{experts}.down_proj": stacks["down_proj.weight"]}
    else:
        written |= {f"{experts}.{e}.{name}": array[e] for name, array in stacks.items() for e in range(array.shape[0])}
    restored = normalise(raw(written))
    assert set(restored) == set(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(np.array(restored[name]), np.array(array), rtol=1e-5, atol=1e-6)


def refusal(folder: Path) -> str:
    head = load_pair(folder).own_parts["mtp"]
    assert isinstance(head, Refused)
    return head.reason


def test_what_is_wrong_with_a_head_is_told(tmp_path: Path) -> None:
    tensors = head_tensors(tiny_head(tiny_model("qwen3_5", 1)))
    assert "not supported" in refusal(save_checkpoint(tmp_path / "llama", "llama"))
    assert refusal(save_checkpoint(tmp_path / "none", "qwen3_5", 1)) == "its checkpoint holds no MTP head"
    folder = save_checkpoint(tmp_path / "part", "qwen3_5", 1)
    write(folder, {name: array for name, array in tensors.items() if name != "mtp.fc.weight"})
    assert "fc.weight" in refusal(folder)
    folder = save_checkpoint(tmp_path / "shape", "qwen3_5", 1)
    write(folder, {**tensors, "mtp.fc.weight": mx.zeros((3, 3))})
    assert "fc.weight" in refusal(folder)
    folder = save_checkpoint(tmp_path / "lost", "qwen3_5", 1)
    index = {"weight_map": {"mtp.fc.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors, which is missing" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    assert "can't be read" in refusal(folder)


@pytest.mark.parametrize(("name", "value"), [("mtp_use_dedicated_embeddings", True), ("mtp_num_hidden_layers", 2)])
def test_heads_of_another_build_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    folder = save_checkpoint(tmp_path / "m", "qwen3_5", 1)
    write(folder, head_tensors(tiny_head(tiny_model("qwen3_5", 1))))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"][name] = value
    (folder / "config.json").write_text(json.dumps(config))
    assert "not supported" in refusal(folder)
