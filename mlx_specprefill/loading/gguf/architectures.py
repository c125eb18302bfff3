"""The architectures of GGUF files that can be loaded, one row each, and the model's configuration from the metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf import MODEL_ARCH

from ...errors import LoadError
from .header import Header, shorten

ROPE_FACTORS = "rope_freqs.weight"  # divisor of every RoPE frequency: Llama 3.1's scaling, precomputed
_MAX_SIZE = 2**31 - 1
_GEMMA3_PATTERN = 6  # every sixth layer has full attention, the others a window
_GEMMA3_27B = 62  # layers of the one size whose queries are not scaled by the head's size


@dataclass(frozen=True, slots=True)
class Architecture:
    """Conversion of one `general.architecture` to a model of mlx-lm.

    Attributes:
        model_type: the file of `mlx_lm/models`.
        names: the gguf package's table of tensor names.
        interleaved: llama.cpp stores the rows of q and k in the order of its RoPE; loading reorders them.
        norm_offset: added to the weights of norms by llama.cpp's converter.
    """

    model_type: str
    names: MODEL_ARCH
    interleaved: bool = False
    norm_offset: float = 0.0


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", MODEL_ARCH.LLAMA, interleaved=True),
    "qwen2": Architecture("qwen2", MODEL_ARCH.QWEN2),
    "qwen3": Architecture("qwen3", MODEL_ARCH.QWEN3),
    "gemma3": Architecture("gemma3_text", MODEL_ARCH.GEMMA3, norm_offset=1.0),
}


def architecture_in(header: Header) -> tuple[str, Architecture]:
    """Return the file's architecture with its name.

    Raises:
        LoadError: it is not in the table, or the file is no whole model.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise LoadError(f"the architecture {shorten(name)} is not supported, only {', '.join(ARCHITECTURES)}")
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise LoadError(f"it holds no model (general.type is {shorten(kind)})")
    parts = header.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise LoadError(f"it is one of {shorten(parts)} parts; join them with llama.cpp's `llama-gguf-split --merge`")
    return name, ARCHITECTURES[name]


def config_in(header: Header) -> dict[str, Any]:
    """Return the config.json of the file's model, checked against the sizes of its tensors.

    So no model larger than the file is built.

    Raises:
        LoadError: a setting is missing, impossible, or contradicts the tensors.
    """
    name, architecture = architecture_in(header)
    settings = _Settings(header, name)
    heads, embedding = settings.size("attention.head_count"), settings.shape("token_embd.weight")
    width = settings.size("embedding_length")
    head_dim = settings.size("attention.key_length", width // heads)
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": embedding[0],
        "hidden_size": width,
        "num_hidden_layers": settings.size("block_count"),
        "intermediate_size": settings.size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": settings.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": settings.real("rope.freq_base", 10_000.0),
        "max_position_embeddings": settings.size("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    _check_sizes(settings, config)
    return config | _rope_scaling(settings, config) | _special(settings, config)


class _Settings:
    """The metadata of one architecture."""

    def __init__(self, header: Header, name: str) -> None:
        self.header, self.name = header, name

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number."""
        value = self.header.metadata.get(f"{self.name}.{key}", default)
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            raise LoadError(f"{self.name}.{key} is {shorten(value)}, not a whole number from 1 on")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a positive finite number."""
        value: Any = self.header.metadata.get(f"{self.name}.{key}", default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise LoadError(f"{self.name}.{key} is {shorten(value)}, not a positive number")
        return float(value)

    def optional(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.name}.{key}")

    def shape(self, tensor: str) -> tuple[int, int]:
        """Return the (rows, columns) of a required matrix."""
        info = self.header.tensors.get(tensor)
        if info is None or len(info.shape) != 2:
            raise LoadError(f"it has no matrix {tensor}")
        return info.shape[0], info.shape[1]


def _check_sizes(settings: _Settings, config: dict[str, Any]) -> None:
    """Check the metadata against the tensors."""
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    layers = config["num_hidden_layers"]
    if layers > len(settings.header.tensors):
        raise LoadError(f"{settings.name}.block_count is {layers}, but it has {len(settings.header.tensors)} tensors")
    if head_dim % 2 or heads % kv_heads:
        raise LoadError(f"{heads} heads of {head_dim} with {kv_heads} for keys and values are no possible attention")
    rotated = settings.optional("rope.dimension_count")
    if rotated not in (None, head_dim):
        raise LoadError(f"{settings.name}.rope.dimension_count is {shorten(rotated)}, but only {head_dim} is supported")


def _rope_scaling(settings: _Settings, config: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_scaling` in mlx-lm's form, if the file scales its positions."""
    if ROPE_FACTORS in settings.header.tensors:
        return {}  # the factors are loaded with the weights
    kind = settings.optional("rope.scaling.type")
    if kind in (None, "none"):
        return {}
    factor = settings.real("rope.scaling.factor")
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        original = settings.size("rope.scaling.original_context_length", config["max_position_embeddings"])
        return {"rope_scaling": {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}}
    raise LoadError(f"{settings.name}.rope.scaling.type is {shorten(kind)}; only linear and yarn are supported")


def _special(settings: _Settings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a single architecture."""
    if settings.name == "llama":
        return {"attention_bias": "blk.0.attn_q.bias" in settings.header.tensors}
    if settings.name != "gemma3":
        return {}
    if settings.optional("final_logit_softcapping"):
        raise LoadError("gemma3.final_logit_softcapping is not supported")
    per_head = config["hidden_size"] // config["num_attention_heads"]
    pattern = settings.size("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    if config["num_hidden_layers"] < pattern:
        raise LoadError(f"gemma3.block_count is {config['num_hidden_layers']}, less than one round of {pattern} layers")
    return {
        "sliding_window_pattern": pattern,
        "sliding_window": settings.size("attention.sliding_window"),
        "rope_local_base_freq": settings.real("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": per_head if config["num_hidden_layers"] == _GEMMA3_27B else config["head_dim"],
    }
