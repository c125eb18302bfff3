"""TriForce (section 4): the target drafts for itself on a small part of its cache, on top of a smaller model.

The middle level needs no weights of its own. A forward on the small part reads the same weights but few keys and
values, which pays off when reading the whole cache takes most of the time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from ..adapters.capture import AttentionRecord, recorded_attention
from ..cache.positioned import PositionedKVCache, leaves
from ..config import SpeculationConfig
from ..errors import SparseUnsupportedError
from .proposers import AcceptanceCounts, Drafter, Proposal, Proposer, Verified
from .retrieval_cache import RetrievalKVCache
from .rollback import Rollback
from .token_sampler import TokenSampler
from .verification import verify

__all__ = ["RetrievalPromptCache", "TriForceProposer"]


class RetrievalPromptCache:
    """A retrieval cache per layer of full attention. Windows and recurrent states are copied unchanged.

    Args:
        source: the target's prompt cache.

    Raises:
        SparseUnsupportedError: there is nothing to retrieve from.
    """

    def __init__(self, source: Sequence[Any], config: SpeculationConfig) -> None:
        self.source = source
        self._small: dict[int, RetrievalKVCache] = {}
        for part in leaves(source):
            if isinstance(part, PositionedKVCache) or type(part) is KVCache:
                self._small[id(part)] = RetrievalKVCache(part, config.budget, config.chunk)
        if not self._small:
            raise SparseUnsupportedError("no layer keeps keys of the whole text")
        self.caches: list[Any] = []

    @property
    def full(self) -> bool:
        """Return whether `rebuild` is needed before further drafts."""
        return any(small.full for small in self._small.values() if not small.source.empty())

    def rebuild(self, attention: AttentionRecord, row: int) -> None:
        """Choose chunks by the queries of one row of the recorded forward.

        Raises:
            SparseUnsupportedError: the queries can't be assigned to layers, or don't fit the keys.
        """
        layers = [part for part in leaves(self.source) if not isinstance(part, ArraysCache) and not part.empty()]
        if attention.handwritten or len(attention.queries) != len(layers):
            raise SparseUnsupportedError(f"{len(attention.queries)} attention calls for {len(layers)} layers with keys")
        for part, queries, keys in zip(layers, attention.queries, attention.keys, strict=True):
            small = self._small.get(id(part))
            if small is None:
                continue
            if keys[1] != part.keys.shape[1] or keys[-1] != part.keys.shape[-1]:
                raise SparseUnsupportedError("attention sees other keys than the cache holds")
            small.rebuild(queries[0, :, row])

    def follow(self) -> None:
        """Drop drafted tokens, and copy the target's recent ones."""
        for small in self._small.values():
            if not small.source.empty():
                small.follow()
        self.caches = [self._mirrored(part) for part in self.source]

    def _mirrored(self, part: Any) -> Any:
        if isinstance(part, CacheList):
            return CacheList(*(self._mirrored(inner) for inner in part.caches))
        small = self._small.get(id(part))
        if small is not None and not small.empty():
            return small
        mirrored = copy.copy(part)
        mirrored.state = copy.deepcopy(part.state)  # shares memory until one of the two is written
        return mirrored


class TriForceProposer(Proposer):
    """A small model drafts, the target on its retrieved cache verifies and corrects, and the result is proposed.

    Tokens that pass the inner verification have the distribution of the middle level, and are proposed with that
    distribution (the paper's CORRECT; its published code records the same one but draws from another after a
    rejection).
    """

    inner: AcceptanceCounts

    def __init__(self, model: nn.Module, source: Sequence[Any], config: SpeculationConfig, drafter: Drafter) -> None:
        self.model = model
        self.gamma = config.gamma2
        self.retrieved = RetrievalPromptCache(source, config)
        self.drafter = drafter
        self.inner = AcceptanceCounts()

    def recording(self) -> AbstractContextManager[AttentionRecord]:
        return recorded_attention()

    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Proposal:
        proposal = Proposal()
        if not self.retrieved.caches:
            return proposal  # the first forward is an ordinary one, whose queries choose the chunks
        while len(proposal.tokens) < count:
            so_far = [*text, *proposal.tokens]
            drafted = self.drafter.propose(so_far, self.drafter.gamma, sampler)
            self._verify(so_far, drafted, proposal, sampler)
            if proposal.tokens[-1] in sampler.stops:
                break
        return proposal

    def _verify(self, text: list[int], drafted: Proposal, proposal: Proposal, sampler: TokenSampler) -> None:
        """Run one inner round: append the kept tokens and the next one to `proposal`. Does not feed the last one."""
        rollback = Rollback(self.retrieved.caches)
        logits = rollback.forward(self.model, mx.array([[text[-1], *drafted.tokens]]))
        distributions = sampler.distributions(logits, text, drafted.tokens)
        verdict = verify(distributions, drafted.distributions, drafted.tokens, sampler.rng)
        rollback.keep(1 + verdict.accepted)
        self.drafter.keep(len(text) + verdict.accepted)
        proposal.tokens.extend([*drafted.tokens[: verdict.accepted], verdict.token])
        proposal.distributions.extend(distributions[: verdict.accepted + 1])
        self.inner.add(len(drafted.tokens), verdict.accepted)

    def settle(self, verified: Verified) -> None:
        self.drafter.settle(verified)
        if verified.accepted < verified.proposed or self.retrieved.full:
            self.retrieved.rebuild(verified.recorded, verified.row)
        self.retrieved.follow()
