"""Says which strategy can draft answers with these models, and makes its proposer: ngram, draft, triforce, mtp."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..adapters.depth import FirstLayers
from ..adapters.mtp import MTPHead
from ..adapters.registry import adapter_for, architecture_of
from ..config import SpeculationConfig
from ..errors import Refused
from ..events import Progress
from ..request import TokenIds
from .drafter import Drafter
from .mtp_proposer import MTPProposer, PromptReader
from .ngram import NgramProposer
from .proposer import Proposer
from .rollback import rollback_refusal
from .triforce import TriForceProposer

StrategyName = Literal["ngram", "draft", "triforce", "mtp"]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)
_READ_STEP = 256  # tokens per forward while the small model reads


def make_proposer(
    strategy: StrategyName,
    target: nn.Module,
    cache: list[Any],
    prompt: TokenIds,
    config: SpeculationConfig,
    *,
    draft: nn.Module | None,
    draft_cache: list[Any],
    reader: PromptReader | None,
    draft_vocab: int | None = None,
) -> Generator[Progress, None, Proposer]:
    """Make the strategy's proposer. Yields between forwards.

    Args:
        cache: the target's, which holds the prompt.
        draft: the small model; `draft_cache` holds exactly the prompt if the model has read it.
        reader: the target's MTP head, which has read the prompt along with it.
        draft_vocab: rows of the draft's embedding, if the target may have more.

    Raises:
        SparseUnsupportedError: the target's cache has nothing to retrieve from.
    """
    if strategy == "ngram":
        return NgramProposer(prompt, config)
    if strategy == "mtp":
        assert reader is not None
        return MTPProposer(reader, config.gamma)
    assert draft is not None
    if strategy == "triforce":
        ends = yield from read_ends(draft, prompt, config.sinks, config.window)
        return TriForceProposer(target, cache, config, Drafter(draft, ends, config.gamma1, draft_vocab))
    return Drafter(draft, draft_cache, config.gamma, draft_vocab)


def refusal(
    strategy: StrategyName,
    target: nn.Module,
    draft: nn.Module | Refused,
    mtp: MTPHead | Refused,
    quantized: bool = False,
) -> str | None:
    """Return why a strategy can't run with these models; None if it can.

    Args:
        draft: the proposing model.
        mtp: the target's MTP head.
        quantized: the target's cache will be quantised.
    """
    general = adapter_for(architecture_of(target)).speculation_refusal
    if (general := general or rollback_refusal(target, make_prompt_cache(target))) is not None:
        return general
    if strategy in ("draft", "triforce") and (refused := _draft_refusal(draft)) is not None:
        return refused
    if strategy == "triforce" and quantized:
        return "parts of a quantised cache can't be retrieved"
    return mtp.reason if strategy == "mtp" and isinstance(mtp, Refused) else None


def _draft_refusal(draft: nn.Module | Refused) -> str | None:
    if isinstance(draft, Refused):
        return draft.reason
    if isinstance(draft, FirstLayers):
        return f"the draft runs its first {draft.count} layers only, which do not say what token comes next"
    refused = rollback_refusal(draft, make_prompt_cache(draft))
    return None if refused is None else f"the draft: {refused}"


def read_ends(draft: nn.Module, prompt: TokenIds, sinks: int, window: int) -> Generator[Progress, None, list[Any]]:
    """Return a small model's cache of a prompt's first `sinks` and last `window` tokens, read as one text.

    The cost does not depend on the prompt's length.
    """
    ids = np.asarray(prompt, dtype=np.int32)
    read = mx.array(np.concatenate([ids[:sinks], ids[max(sinks, ids.size - window) :]]))[None]
    cache: list[Any] = make_prompt_cache(draft)
    for start in range(0, read.shape[1], _READ_STEP):
        end = min(start + _READ_STEP, read.shape[1])
        draft(read[:, start:end], cache=cache)
        mx.eval([part.state for part in cache])
        yield Progress("draft", end, read.shape[1])
    return cache
