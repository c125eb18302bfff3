"""Models out of GGUF files equal the same weights out of safetensors."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from mlx_specprefill import LoadError, load_pair
from mlx_specprefill.adapters.startup_checks import largest_hidden
from mlx_specprefill.cache.prefix.identity import model_identity
from mlx_specprefill.loading import one_model
from mlx_specprefill.loading.gguf import load_gguf
from mlx_specprefill.loading.gguf import weights as gguf_weights
from mlx_specprefill.loading.gguf.header import TensorInfo
from mlx_specprefill.loading.gguf.weights import EXACT_BITS, GROUP, packed_bits, read_arrays
from tests.support.gguf_files import CONFIGS, F32, contents, from_safetensors, random_weights, rounded, tiny

PROMPT = mx.array(np.random.default_rng(3).integers(3, 250, (1, 24)))
PACKED = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)


def logits(model):
    return np.array(model(PROMPT).astype(mx.float32))


def mixed(name):
    """As in real files: rows of several types in one model, the embedding finer."""
    if "embed_tokens" in name or "lm_head" in name:
        return Kind.Q8_0
    return Kind.Q4_0 if "mlp" in name else Kind.Q4_1


@pytest.mark.parametrize("architecture", CONFIGS)
def test_unpacked_weights_equal_safetensors(tmp_path, architecture):
    config = CONFIGS[architecture]
    weights = random_weights(config)
    file = contents(architecture, config, weights).write(tmp_path / "tiny.gguf")
    expected = logits(from_safetensors(tmp_path / "folder", config, weights))
    model, _, read = load_gguf(file)
    assert np.abs(logits(model) - expected).max() < 1e-5 * max(1, np.abs(expected).max())
    assert {key: read[key] for key in config} == pytest.approx(config)


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("kind", [*PACKED, "mixed"], ids=lambda kind: getattr(kind, "name", kind))
def test_packed_weights_equal_their_values(tmp_path, architecture, kind):
    config, kind_of = CONFIGS[architecture], mixed if kind == "mixed" else lambda _: kind
    weights = random_weights(config)
    file = contents(architecture, config, weights, kind_of).write(tmp_path / "tiny.gguf")
    expected = logits(from_safetensors(tmp_path / "folder", config, rounded(weights, kind_of)))
    for pack in (True, False):
        model, _, read = load_gguf(file, dtype=mx.float32, pack=pack)
        assert np.abs(logits(model) - expected).max() < 1e-5 * max(1, np.abs(expected).max())
        layers = [
            module for module in model.modules() if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
        ]
        assert len(layers) == (sum(array.ndim > 1 for array in weights.values()) if pack else 0)
        assert ("quantization" in read) == pack


def equal(folder, architecture, config, extra=None, metadata=None):
    """A file with these tensors and metadata beside the usual ones, against the folder with this configuration."""
    weights = random_weights(config)
    made = contents(architecture, config, weights)
    made.tensors |= {name: (array, F32) for name, array in (extra or {}).items()}
    made.metadata |= metadata or {}
    model, _, _ = load_gguf(made.write(folder / "tiny.gguf"))
    expected = logits(from_safetensors(folder / "folder", config, weights))
    return np.abs(logits(model) - expected).max() < 1e-5 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_heads_of_their_own_and_tied_ones(tmp_path, architecture, tied):
    assert equal(tmp_path, architecture, {**CONFIGS[architecture], "tie_word_embeddings": tied})


def test_biases_of_llamas_attention(tmp_path):
    assert equal(tmp_path, "llama", {**CONFIGS["llama"], "attention_bias": True})


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def llama3_factors(config):
    """As llama.cpp's converter works them out."""
    original, factors = LLAMA3["original_max_position_embeddings"], []
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    for index in range(0, config["head_dim"], 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (index / config["head_dim"])
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(LLAMA3["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    assert len(set(factors)) > 2
    return np.array(factors, np.float32)


def test_llama_3s_scaling_comes_as_factors(tmp_path):
    config = {**CONFIGS["llama"], "head_dim": 32, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    assert equal(tmp_path, "llama", config, extra={"rope_freqs.weight": llama3_factors(config)})


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaling_by_name(tmp_path, architecture, kind):
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 128}
    key = f"{architecture}.rope.scaling"
    metadata = {f"{key}.type": kind, f"{key}.factor": 4.0, f"{key}.original_context_length": 128}
    assert equal(tmp_path, architecture, {**CONFIGS[architecture], "rope_scaling": scaling}, metadata=metadata)


def test_a_file_and_a_folder_are_a_pair(tmp_path):
    """The converter calls more tokens special than a tokenizer.json does; what is cut out whole is the same."""
    file = tiny("llama").write(tmp_path / "target.gguf")
    folder = tmp_path / "draft"
    from_safetensors(folder, CONFIGS["qwen3"], random_weights(CONFIGS["qwen3"]))
    load_pair(file).tokenizer.save_pretrained(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["added_tokens"][0]["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    pair = load_pair(file, folder)
    assert pair.sparse_refusal is None
    assert not load_pair(folder).tokenizer.added_tokens_decoder[0].special


def test_the_identity_for_caches(tmp_path):
    """The same for two loads from two paths; another for packed weights, whose products are rounded differently."""
    config = CONFIGS["llama"]
    made = contents("llama", config, random_weights(config), mixed)
    first, second = made.write(tmp_path / "a.gguf"), made.write(tmp_path / "b.gguf")
    names = []
    for file, pack in ((first, True), (second, True), (first, False)):
        model, _, read = load_gguf(file, dtype=mx.float32, pack=pack)
        names.append(model_identity(model, read))
    assert names[0] == names[1] != names[2]


def random_rows(kind, rows=6, blocks=40):
    """Rows of random blocks, (rows, bytes) uint8, with scales between .001 and .01 of both signs."""
    random = np.random.default_rng(kind)
    data = random.integers(0, 256, (rows, blocks, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    halves = {Kind.Q6_K: [-2], Kind.Q3_K: [-2], Kind.Q2_K: [-4, -2]}.get(kind, [0, 2])
    for at in halves if kind not in (Kind.Q4_0, Kind.Q5_0, Kind.Q8_0, Kind.IQ4_XS) else [0]:
        scales = random.uniform(1e-3, 1e-2, (rows, blocks, 1)) * random.choice([-1, 1], (rows, blocks, 1))
        data[..., at : at + 2 or None] = scales.astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


def unpacked(folder, kind, dtype):
    """The values of random rows by this project's packing and MLX, and by the gguf package: (groups, 32) float32."""
    data = random_rows(kind)
    expected = dequantize(data, kind)
    file = folder / "rows"
    file.write_bytes(data.tobytes())
    with file.open("rb") as stream:
        arrays = read_arrays(TensorInfo("x", expected.shape, kind, 0, data.size), stream, pack=True)
    scales, biases = (arrays[name].astype(dtype) for name in ("scales", "biases"))
    values = mx.dequantize(arrays["weight"], scales, biases, GROUP, packed_bits(kind))
    return np.array(values.astype(mx.float32)).reshape(-1, GROUP), expected.reshape(-1, GROUP)


@pytest.mark.parametrize("kind", EXACT_BITS, ids=lambda kind: kind.name)
def test_packed_values_are_those_of_the_gguf_package(tmp_path, kind):
    """A value is a product and a sum. Scale, bias and their sum are each rounded once in half precision."""
    values, expected = unpacked(tmp_path, kind, mx.float32)
    assert np.array_equal(values, expected)
    values, _ = unpacked(tmp_path, kind, mx.float16)
    terms = np.abs(expected).max(axis=1) + np.ptp(expected, axis=1)
    assert (np.abs(values - expected).max(axis=1) < 1.5 * 2**-10 * terms).all()


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q6_K, Kind.IQ4_XS], ids=lambda kind: kind.name)
def test_other_quantised_types_are_rounded_to_8_bits(tmp_path, kind):
    values, expected = unpacked(tmp_path, kind, mx.float32)
    assert (np.abs(values - expected).max(axis=1) <= 1.01 * np.ptp(expected, axis=1) / 255).all()


@pytest.mark.extended
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_large_tensors_are_converted_in_pieces(tmp_path, monkeypatch, architecture):
    config, kind_of = CONFIGS[architecture], mixed
    file = contents(architecture, config, random_weights(config), kind_of).write(tmp_path / "tiny.gguf")
    for pack in (True, False):
        expected = logits(load_gguf(file, pack=pack)[0])
        with monkeypatch.context() as small:
            small.setattr(gguf_weights, "_PIECE", 1000)
            assert np.array_equal(logits(load_gguf(file, pack=pack)[0]), expected)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_other_types_are_read_by_the_gguf_package(tmp_path, kind):
    config = CONFIGS["qwen3"]
    weights = random_weights(config)
    file = contents("qwen3", config, weights, lambda _: kind).write(tmp_path / "tiny.gguf")
    expected = logits(from_safetensors(tmp_path / "folder", config, rounded(weights, lambda _: kind)))
    model, _, _ = load_gguf(file, dtype=mx.float32)
    assert np.abs(logits(model) - expected).max() < 1e-5 * max(1, np.abs(expected).max())


@pytest.mark.parametrize(("kind", "dtype"), [(F32, mx.float32), (Kind.BF16, mx.bfloat16), (Kind.Q4_0, mx.float16)])
def test_the_files_own_dtype(tmp_path, kind, dtype):
    config = CONFIGS["llama"]
    file = contents("llama", config, random_weights(config), lambda _: kind).write(tmp_path / "tiny.gguf")
    model, _, _ = load_gguf(file)
    assert model.model.norm.weight.dtype == dtype
    assert model(PROMPT).dtype == dtype


def test_a_pair_of_files(tmp_path):
    target = tiny("llama").write(tmp_path / "big.Q4_1.gguf")
    draft = tiny("qwen3").write(tmp_path / "small.gguf")
    pair = load_pair(target, draft)
    assert pair.sparse_refusal is None
    assert (pair.target_id, pair.draft_id, pair.model_type) == ("big.Q4_1", "small", "llama")
    assert (pair.context_length, pair.draft_context, pair.dtype) == (512, 512, "float32")
    assert pair.eos_token_ids == {0, 2}


def test_auto_unpacks_on_the_cpu_only(tmp_path):
    config = CONFIGS["llama"]
    file = contents("llama", config, random_weights(config), mixed).write(tmp_path / "tiny.gguf")
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert isinstance(load_pair(file).target.lm_head, nn.Linear if on_cpu else nn.QuantizedLinear)
    asked = load_pair(file, dtype="float32")
    assert isinstance(asked.target.lm_head, nn.QuantizedLinear)
    assert asked.dtype == "float32"


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(one_model, "_on_cpu", lambda: False)


def reaching(folder, largest):
    """A file whose hidden values reach about that much."""
    config = CONFIGS["llama"]
    weights = random_weights(config)
    scale = 1.0
    while True:
        scaled = {name: array * np.float32(scale if "down_proj" in name else 1) for name, array in weights.items()}
        file = contents("llama", config, scaled, lambda _: Kind.Q8_0).write(folder / "tiny.gguf")
        reached = largest_hidden(load_gguf(file, dtype=mx.float32)[0])
        if 0.9 < reached / largest < 1.1:
            return file
        scale *= largest / reached


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_model_that_overflows_in_float16_is_refused(tmp_path):
    file = reaching(tmp_path, 200_000)
    with pytest.raises(LoadError, match=r"tiny\.gguf: .* overflow in float16: .* --dtype bfloat16"):
        load_pair(file)
    assert np.isfinite(logits(load_pair(file, dtype="bfloat16").target)).all()


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("largest", "warnings"), [(20_000, 0), (50_000, 1)])
def test_a_model_that_comes_near_is_warned_of(tmp_path, caplog, largest, warnings):
    load_pair(reaching(tmp_path, largest))
    found = [record.getMessage() for record in caplog.records if "--dtype bfloat16" in record.getMessage()]
    assert len(found) == warnings
