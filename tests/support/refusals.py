"""Reasons why architectures of mlx-lm are refused. `scripts/make_support_table.py` writes them into `verified.json`.

Tests assert that the oracles agree with these tables.
"""

from __future__ import annotations

from collections.abc import Mapping

_NO_ATTENTION = "it has no attention layers, so there is nothing to score and no positions to restore"
_SLOT_TOP_K = "its block selection is cut over storage slots, not over positions"
_LEARNED_POSITIONS = "its learned position embedding is looked up by storage slot"
_CHUNKED = "its chunked cache derives the attention mask from the slot, not from the position"
_NOT_IMPORTABLE = "mlx-lm can't import it without the package ai2-olmo, so it was not verified"
DEPTH_DIFFERS = "its first layers alone differ from those of the whole model"
_METAL_ONLY = "it runs on Metal kernels only and could not be verified"

# Reasons why sparse prefill is not exact.
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

_OWN_ATTENTION = "it computes attention itself, from the keys of one sequence"

# Reasons to decode rows one by one.
BATCH_REFUSALS: Mapping[str, str] = {
    "afm7": "its KV-reuse layers rotate queries by the slots of one sequence",
    "bitnet": _METAL_ONLY,
    "deepseek_v32": "it gathers a subset of the keys of one sequence",
    "gemma2": _OWN_ATTENTION,
    "glm_moe_dsa": "it gathers a subset of the keys of one sequence",
    "gpt_bigcode": "it looks up the positions of one sequence",
    "minimax_m3_vl": "its block selection reads the keys of one sequence",
    "muse_spark": _METAL_ONLY,
    "olmo": _NOT_IMPORTABLE,
    "phi": _OWN_ATTENTION,
    "phi3small": "its block-sparse attention reads the keys of one sequence",
    "phixtral": _OWN_ATTENTION,
    "plamo": _OWN_ATTENTION,
    "prism_hadamard_qwen35": "it was not verified: its weights exist in a quantised form only",
    "stablelm": _OWN_ATTENTION,
}

# Reasons why several tokens in one forward differ from single ones, so that proposals can't be verified.
SPECULATION_REFUSALS: Mapping[str, str] = {
    "phi3small": "its block-sparse attention of several tokens differs from that of single tokens",
    "plamo3": "its window is one token wider when it is fed several tokens than when it is fed one",
}

# Reasons why cached keys can't be moved to other positions.
_NOT_ROTATED = "keys at other positions are not the rotated ones"
_OTHER_CACHES = (
    "afmoe bailing_hybrid bailing_moe_linear bailing_moe_v3 cohere2 exaone4 exaone_moe falcon_h1 gear gemma3 "
    "gemma3_text gemma3n gemma4 gemma4+experts gemma4_text gemma4_text+experts gpt_oss gpt_oss+yarn "
    "granitemoehybrid iquestloopcoder jamba kimi_k3 kimi_linear laguna lfm2 lfm2-vl lfm2_moe llama+window "
    "mellum mimo_v2_flash ministral3 muse_glimmer nemotron_h nemotron_h+experts olmo3 olmo_hybrid plamo2 "
    "plamo3 qwen3_5 qwen3_5+checkpoint qwen3_5_moe qwen3_next qwen3_next+gqa recurrent_gemma spark2_5 step3p5 "
).split()
MOVE_REFUSALS: Mapping[str, str] = {
    **dict.fromkeys(_OTHER_CACHES, "windows and recurrent states can't be moved"),
    "llama+dynamic": "its rotations change with the text's length",
    **dict.fromkeys(("hunyuan", "hunyuan_v1_dense", "mistral3", "mistral4"), _NOT_ROTATED),  # by length or position
    **dict.fromkeys(("deepseek_v2", "gptj", "minicpm3", "nanochat", "talkie", "youtu_llm"), _NOT_ROTATED),  # in parts
}

# Queries scaled by position, weighted norms after the rotation, a gate computed from rotated queries.
ABSOLUTE = frozenset({"hunyuan", "hunyuan_v1_dense", "iquestloopcoder", "ministral3", "mistral3", "mistral4"})
