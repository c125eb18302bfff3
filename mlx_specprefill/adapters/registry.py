"""Architectures of mlx-lm that can be prefilled sparsely or used as a draft.

An architecture is a file in `mlx_lm/models`. `verified.json` holds one row per file, measured by
`scripts/make_support_table.py`, which compares sparse prefill with a masked dense run of the same model. An
architecture without a row is refused, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import MODEL_REMAPPING

from .depth import FirstLayers

__all__ = [
    "BATCH_REFUSALS",
    "DRAFT_REFUSALS",
    "SPARSE_REFUSALS",
    "SPECULATION_REFUSALS",
    "STAGED_REFUSALS",
    "Adapter",
    "adapter_for",
    "architecture_of",
    "verified",
]

_NO_ATTENTION = "it has no attention layers, so there is nothing to score and no positions to restore"
_SLOT_TOP_K = "its block selection is cut over storage slots, not over positions"
_LEARNED_POSITIONS = "its learned position embedding is looked up by storage slot"
_CHUNKED = "its chunked cache derives the attention mask from the slot, not from the position"
_NOT_IMPORTABLE = "mlx-lm can't import it without the package ai2-olmo, so it was not verified"
_DEPTH_DIFFERS = "its first layers alone differ from those of the whole model"
_METAL_ONLY = "it runs on Metal kernels only and could not be verified"

# Reasons why sparse prefill is not exact. A test asserts that the oracle agrees with this table.
SPARSE_REFUSALS: Mapping[str, str] = {
    "afm7": "its KV-reuse layers rotate queries by storage slot",
    "baichuan_m1": "it convolves keys and values of neighbouring slots inside attention",
    "bitnet": _METAL_ONLY,
    "deepseek_v41": "its cache compresses keys by storage slot",
    "gpt2": _LEARNED_POSITIONS,
    "gpt_bigcode": _LEARNED_POSITIONS,
    "llama4": _CHUNKED,
    "longcat_flash_ngram": "its n-gram embedding reads the neighbouring tokens of the full prompt",
    "mamba": _NO_ATTENTION,
    "mamba2": _NO_ATTENTION,
    "minimax_m3_vl": _SLOT_TOP_K,
    "muse_spark": _METAL_ONLY,
    "olmo": _NOT_IMPORTABLE,
    "phi3small": "its block-sparse attention is laid out over storage slots",
    "prism_hadamard_qwen35": "it was not verified: its weights exist in a quantised form only",
    "rwkv7": _NO_ATTENTION,
}

# Reasons why attention rows over the whole prompt can't be read.
DRAFT_REFUSALS: Mapping[str, str] = {
    "bitnet": _METAL_ONLY,
    "deepseek_v32": "it attends to a gathered subset of the keys when it decodes",
    "deepseek_v41": "it attends to compressed keys",
    "glm_moe_dsa": "it attends to a gathered subset of the keys when it decodes",
    "mamba": _NO_ATTENTION,
    "mamba2": _NO_ATTENTION,
    "muse_spark": _METAL_ONLY,
    "olmo": _NOT_IMPORTABLE,
    "prism_hadamard_qwen35": "it was not verified: its weights exist in a quantised form only",
    "recurrent_gemma": "none of its attention layers spans the prompt",
    "rwkv7": _NO_ATTENTION,
}

# Reasons to decode rows one by one although their caches have a batch form.
BATCH_REFUSALS: Mapping[str, str] = {
    "afm7": "its KV-reuse layers rotate queries by the slot that all rows share",
    "bitnet": _METAL_ONLY,
    "gpt_bigcode": "it looks up the positions of one sequence",
    "minimax_m3_vl": "its block selection is cut over slots, padding included",
    "muse_spark": _METAL_ONLY,
    "olmo": _NOT_IMPORTABLE,
    "phi3small": "its block-sparse attention takes no mask per row",
    "prism_hadamard_qwen35": "it was not verified: its weights exist in a quantised form only",
}

# Reasons why several tokens in one forward differ from single ones, so that proposals can't be verified.
SPECULATION_REFUSALS: Mapping[str, str] = {
    "phi3small": "its block-sparse attention of several tokens differs from that of single tokens",
    "plamo3": "its window is one token wider when it is fed several tokens than when it is fed one",
}

# Reasons why a forward can't be split into first layers over the prompt and others over the kept tokens.
STAGED_REFUSALS: Mapping[str, str] = {
    "gemma3n": "its layers pass on several hidden states per token and share keys with earlier ones",
    "iquestloopcoder": "its forward runs over its layers twice and calls parts of them",
    "kimi_k3": "its layers read what all earlier layers returned",
    "nanbeige": "its forward runs over its layers twice",
    "plamo3": SPECULATION_REFUSALS["plamo3"],
    "talkie": "its layers are given the embeddings beside the hidden states",
}

# Queries scaled by position, weighted norms after the rotation, a gate computed from rotated queries.
_ABSOLUTE = frozenset({"hunyuan", "hunyuan_v1_dense", "iquestloopcoder", "ministral3", "mistral3", "mistral4"})


@dataclass(frozen=True, slots=True)
class Adapter:
    """Limits of one architecture.

    Attributes:
        sparse_refusal: why it can't be prefilled sparsely; None if it can.
        draft_refusal: why it can't score a prompt; None if it can.
        depth_refusal: why its first layers can't score alone; None if they can.
        batch_refusal: why it can't decode several sequences in one forward; None if it can.
        speculation_refusal: why it can't verify several tokens in one forward; None if it can.
        staged_refusal: why its layers can't be run in two parts; None if they can at some depth.
        absolute: it depends on absolute positions by design, so moving a whole sequence changes its logits.
    """

    sparse_refusal: str | None = None
    draft_refusal: str | None = None
    depth_refusal: str | None = None
    batch_refusal: str | None = None
    speculation_refusal: str | None = None
    staged_refusal: str | None = None
    absolute: bool = False


@cache
def verified() -> Mapping[str, Mapping[str, Any]]:
    """Return the rows of `verified.json`: architecture -> sparse, reason, error, capture, depth, staged, mlx_lm."""
    rows: dict[str, dict[str, Any]] = json.loads((files(__package__) / "verified.json").read_text(encoding="utf-8"))
    return rows


def adapter_for(model_type: str) -> Adapter:
    """Return the adapter of a `model_type` (or of a file in `mlx_lm/models`). Resolves mlx-lm's aliases."""
    architecture = MODEL_REMAPPING.get(model_type, model_type)
    row = verified().get(architecture)
    if row is None:
        reason = f"architecture {model_type!r} was not verified for sparse prefill"
        return Adapter(
            sparse_refusal=reason,
            draft_refusal=reason,
            depth_refusal=reason,
            batch_refusal=reason,
            speculation_refusal=reason,
            staged_refusal=reason,
        )
    sparse_refusal = None if row["sparse"] else str(row["reason"])
    depth_refusal = None if row["depth"] else DRAFT_REFUSALS.get(architecture, _DEPTH_DIFFERS)
    return Adapter(
        sparse_refusal=sparse_refusal,
        draft_refusal=None if row["capture"] else DRAFT_REFUSALS[architecture],
        depth_refusal=depth_refusal,
        batch_refusal=BATCH_REFUSALS.get(architecture),
        speculation_refusal=SPECULATION_REFUSALS.get(architecture),
        staged_refusal=None if row["staged"] else sparse_refusal or depth_refusal or STAGED_REFUSALS[architecture],
        absolute=architecture in _ABSOLUTE,
    )


def architecture_of(model: nn.Module) -> str:
    """Return the file of `mlx_lm/models` that a loaded model comes from; the safest argument for `adapter_for`.

    A checkpoint's `model_type` can be claimed by its own file (`model_file`) or changed by mlx-lm according to
    `architectures`. The instantiated class is certain.
    """
    whole = model.whole if isinstance(model, FirstLayers) else model
    return type(whole).__module__.removeprefix("mlx_lm.models.")
