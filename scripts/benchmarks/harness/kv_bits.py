"""Quantised KV caches: time per step, memory, and how far they move the next token's distribution."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlx_specprefill.adapters.rope import adjusted_offsets
from mlx_specprefill_evals.forced import divergence

from .prefilled import Prefilled, Text, compared_steps, every_fifth_chunk, prefilled

__all__ = ["BITS", "compared_bits", "divergences"]

BITS = (None, 8, 4)


def named(bits: int | None) -> str:
    return "none" if bits is None else f"{bits} bits"


def compared_bits(
    name: str, model: nn.Module, text: Text, context: int, rows: Sequence[int], tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Time and memory after a full and after a sparse prefill: one line per number of rows and bits."""
    prompt, found = text(0, context), list[dict[str, Any]]()
    for kind, kept in (("full", None), ("sparse", every_fifth_chunk(context))):
        plain = prefilled(model, prompt, kept)
        arms = {named(bits): [plain.quantised(bits)] for bits in BITS}
        for count in rows:
            compared = compared_steps(model, arms, named(None), count, tokens, repeats)
            for arm, figures in compared.items():
                head = {"part": "kv", "model": name, "context": context, "prefill": kind, "rows": count, "kv": arm}
                found.append({**head, "mib": arms[arm][0].mib, **figures})
    return found


def divergences(model: nn.Module, text: Text, context: int, tokens: int, n: int) -> list[dict[str, Any]]:
    """Over so many tokens of real text after the prompt, against the unquantised cache after the same prefill.

    `kl` is the mean of KL(unquantised || quantised) in nats, `kl_worst` that of the worst text, `top1` the share of
    tokens with the same likeliest one.
    """
    taken: dict[tuple[str, int], list[dict[str, float]]] = {}
    for seed in range(n):
        ids = text(1000 + seed, context + tokens)
        prompt, after = ids[:context], ids[context : context + tokens]
        for kind, kept in (("full", None), ("sparse", every_fifth_chunk(context))):
            plain = prefilled(model, prompt, kept)
            exact = logprobs(model, plain, after)
            for bits in (bits for bits in BITS if bits is not None):
                found = divergence(exact, logprobs(model, plain.quantised(bits), after))
                taken.setdefault((kind, bits), []).append(found)
    return [
        {
            "part": "kv-kl",
            "prefill": kind,
            "kv": named(bits),
            "n": n,
            "tokens": n * (tokens - 1),
            "kl": statistics.mean(one["kl"] for one in all_),
            "kl_worst": max(one["kl"] for one in all_),
            "top1": statistics.mean(one["top1"] for one in all_),
        }
        for (kind, bits), all_ in taken.items()
    ]


def logprobs(model: nn.Module, one: Prefilled, after: Sequence[int]) -> npt.NDArray[np.float32]:
    """Of what follows each of these tokens but the last, (T - 1, V). What the first one follows is the prefill's."""
    with adjusted_offsets([one.shift]):
        logits = model(mx.array([list(after[:-1])]), cache=copy.deepcopy(one.cache))[0].astype(mx.float32)
    found: npt.NDArray[np.float32] = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    return found
