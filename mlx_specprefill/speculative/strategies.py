"""Speculation strategies by name: what each needs, and how its proposer is made."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..adapters.capture import recorded_attention
from ..adapters.depth import FirstLayers
from ..adapters.mtp import MTPHead
from ..adapters.registry import adapter_for, architecture_of
from ..adapters.rope import observed_rotations
from ..cache.positioned import PositionedKVCache, Runs, leaves, make_positioned_cache
from ..config import SpeculationConfig
from ..errors import SparseUnsupportedError
from ..request import Progress, TokenIds
from .mtp_proposer import MTPProposer, PromptReader
from .ngram_proposer import NgramProposer
from .proposers import Drafter, DraftModelProposer, Proposer
from .retrieval_proposer import RetrievalPromptCache, TriForceProposer
from .rollback import rollback_refusal
from .streaming_cache import StreamingKVCache

__all__ = ["STRATEGIES", "ProposerInputs", "Strategy", "StrategyName", "gathered", "refusals", "streaming_drafter"]

StrategyName = Literal["ngram", "draft", "triforce", "mtp"]
_STREAM_STEP = 256  # tokens per forward while the small model reads


@dataclass(frozen=True)
class ProposerInputs:
    """What a proposer can be made from.

    Attributes:
        cache: the target's, with the prompt in it.
        prompt: the token ids of the prompt.
        draft: the small model; `draft_cache` holds exactly the prompt in it, if it was read.
        kept: prompt indices that the target holds, None for all.
        reader: the target's MTP head, which has read the prompt along with it.
    """

    target: nn.Module
    cache: list[Any]
    prompt: TokenIds
    config: SpeculationConfig
    draft: nn.Module | None = None
    draft_cache: list[Any] | None = None
    kept: npt.NDArray[np.int32] | None = None
    reader: PromptReader | None = None


Start = Generator[Progress, None, Proposer]


@dataclass(frozen=True)
class Strategy:
    """One speculation strategy.

    Attributes:
        needs_draft: a small model.
        needs_reading: a small model that has read the prompt.
        needs_retrieval: a target whose attention can be pointed to a part of its cache.
        needs_head: a target with an MTP head that has read the prompt.
        start: makes a proposer; yields between forwards.
        gamma: tokens to ask it for at a time.
    """

    start: Callable[[ProposerInputs], Start]
    gamma: Callable[[SpeculationConfig], int]
    needs_draft: bool = False
    needs_reading: bool = False
    needs_retrieval: bool = False
    needs_head: bool = False


def _draft(given: ProposerInputs) -> Start:
    assert given.draft is not None
    assert given.draft_cache is not None
    cache = given.draft_cache
    if given.kept is not None and len(given.prompt) > given.config.gather_above:
        cache = gathered(cache, given.kept)
    return DraftModelProposer(Drafter(given.draft, cache))
    yield


def _triforce(given: ProposerInputs) -> Start:
    assert given.draft is not None
    drafter = yield from streaming_drafter(given.draft, given.prompt, given.config.sinks, given.config.window)
    return TriForceProposer(given.target, given.cache, given.config, drafter, given.config.gamma1)


def _mtp(given: ProposerInputs) -> Start:
    assert given.reader is not None
    return MTPProposer(given.reader)
    yield


def _ngram(given: ProposerInputs) -> Start:
    return NgramProposer(given.prompt, given.config)
    yield


STRATEGIES: dict[StrategyName, Strategy] = {
    "ngram": Strategy(_ngram, lambda config: config.ngram),
    "draft": Strategy(_draft, lambda config: config.gamma, needs_draft=True, needs_reading=True),
    "triforce": Strategy(_triforce, lambda config: config.gamma2, needs_draft=True, needs_retrieval=True),
    "mtp": Strategy(_mtp, lambda config: config.gamma, needs_head=True),
}


def refusals(
    target: nn.Module, draft: nn.Module | str, mtp: MTPHead | str, quantized: bool = False
) -> dict[StrategyName, str | None]:
    """Why each strategy can't run with these models; None where it can. Runs a few short forwards.

    Args:
        draft: the model that may propose tokens, or why there is none.
        mtp: the target's MTP head, or why it has none.
        quantized: the target's cache will be.
    """
    general = _target_refusal(target)
    small = draft if isinstance(draft, str) else _draft_refusal(draft)
    part = "parts of a quantised cache can't be retrieved" if quantized else general or _retrieval_refusal(target)
    headless = mtp if isinstance(mtp, str) else None
    return {
        name: general
        or (small if strategy.needs_draft else None)
        or (part if strategy.needs_retrieval else None)
        or (headless if strategy.needs_head else None)
        for name, strategy in STRATEGIES.items()
    }


def _target_refusal(target: nn.Module) -> str | None:
    refusal = adapter_for(architecture_of(target)).speculation_refusal
    return refusal or rollback_refusal(target, make_prompt_cache(target))


def _draft_refusal(draft: nn.Module) -> str | None:
    if isinstance(draft, FirstLayers):
        return f"the draft runs its first {draft.count} layers only, which do not say what token comes next"
    refusal = rollback_refusal(draft, make_prompt_cache(draft))
    return None if refusal is None else f"the draft: {refusal}"


def _retrieval_refusal(target: nn.Module) -> str | None:
    """A retrieved cache that has room for everything must give what the whole one gives."""
    tokens = mx.arange(40)[None] % 7 + 2
    config = SpeculationConfig(budget=1024)
    try:
        cache = make_positioned_cache(target)
        if not any(isinstance(part, PositionedKVCache) for part in leaves(cache)):
            return "no layer keeps keys of the whole text"
        target(tokens[:, :33], cache=cache)
        with recorded_attention() as attention:
            target(tokens[:, 33:34], cache=cache)
        retrieved = RetrievalPromptCache(cache, config)
        retrieved.rebuild(attention, 0, 0)
        retrieved.follow()
        ours = target(tokens[:, 34:37], cache=retrieved.caches)
        theirs = target(tokens[:, 34:37], cache=cache)
        error = mx.abs(ours - theirs).max() / mx.abs(theirs).max()
    except SparseUnsupportedError as refused:
        return refused.reason
    except (ValueError, TypeError, AttributeError, IndexError) as error_of_model:
        return f"retrieval: {type(error_of_model).__name__}: {error_of_model}"
    off = float(np.array(error.astype(mx.float32)))
    return None if off < _TOLERANCE else "attention to a part of its cache is not what it should be"


_TOLERANCE = 0.02  # relative to the largest logit, in half precision


def gathered(cache: Sequence[Any], kept: npt.NDArray[np.int32]) -> list[Any]:
    """A draft's cache cut down to the prompt indices that the target kept; windows and states stay as they are.

    Keys keep their rotation, so this masks the others out. It changes what is proposed, never what is accepted.
    """
    index = mx.array(kept)
    return [_gathered(part, kept, index) if type(part) is KVCache and not part.empty() else part for part in cache]


def _gathered(part: KVCache, kept: npt.NDArray[np.int32], index: mx.array) -> PositionedKVCache:
    length = int(part.offset)
    small = PositionedKVCache()
    small.inner.state = (mx.take(part.keys, index, axis=2), mx.take(part.values, index, axis=2), int(kept.size))
    small.runs = Runs()
    small.runs.extend(kept)
    small.next = length
    return small


def streaming_drafter(
    draft: nn.Module, prompt: TokenIds, sinks: int, window: int
) -> Generator[Progress, None, Drafter]:
    """A small model that knows the first tokens and the recent ones, as if they were one text.

    It reads just these, which costs the same whatever the prompt's length.
    """
    ids = np.asarray(prompt, dtype=np.int32)
    read = mx.array(np.concatenate([ids[:sinks], ids[max(sinks, ids.size - window) :]]))[None]
    with observed_rotations() as seen:
        cache = [StreamingKVCache(sinks, window, seen) if type(c) is KVCache else c for c in make_prompt_cache(draft)]
        draft(read[:, :1], cache=cache)
    for start in range(1, read.shape[1], _STREAM_STEP):
        end = min(start + _STREAM_STEP, read.shape[1])
        draft(read[:, start:end], cache=cache)
        mx.eval([part.state for part in cache])
        yield Progress("draft", end, read.shape[1])
    return Drafter(draft, cache)
