"""TriForce (section 4): the target drafts for itself on a small part of its cache, on top of a smaller model.

The middle level needs no weights of its own. A forward on the small part reads the same weights but few keys and
values, which pays off when reading the whole cache takes most of the time.

The cache is cut into chunks, and each KV head keeps those with the most attention of the last accepted token's queries
(section 4.1). It always keeps the first chunk, which holds the attention sink, and a ring with exact copies of the most
recent tokens. Keys keep their rotation: dropped chunks leave gaps, and nothing moves.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache

from ..adapters.capture import AttentionRecord, record_attention
from ..cache.held import HeldTokens
from ..cache.positioned import PositionedKVCache, leaves
from ..config import SpeculationConfig
from ..errors import SparseUnsupportedError
from ..events import Progress
from ..request import TokenIds
from .acceptance import TokenSampler, verify
from .drafter import Drafter
from .proposer import Held, Model, Models, Proposal, Proposer, Verified
from .rollback import Rollback

_MAX_RING = 512
_READ_STEP = 256  # tokens per forward while the small model reads
_SHORTLIST = 4  # factor of chunks chosen by their mean keys, then compared by their own keys
_CARRY = 0.25  # part of a chunk's score that the next one gets at least: copied text continues there


def attention_shares(queries: mx.array, keys: mx.array, per_chunk: int) -> mx.array:
    """Return the share of one token's attention, softmax(q k / sqrt(D)), on each chunk, per KV head, (H_kv, C).

    The maximum over query heads with common keys counts, so that one retrieving head is not outvoted (the paper has no
    such heads).

    Args:
        queries: (H, D), rotated.
        keys: (H_kv, C * per_chunk, D): a chunk's own keys, or one mean of them.
    """
    heads, D = keys.shape[0], keys.shape[-1]
    grouped = queries.reshape(heads, -1, D).astype(keys.dtype)
    logits = (grouped @ keys.swapaxes(-1, -2)).astype(mx.float32) * D**-0.5
    shares = mx.softmax(logits, axis=-1)
    return shares.reshape(*shares.shape[:2], -1, per_chunk).sum(axis=-1).max(axis=1)


def best_chunks(scores: mx.array, count: int) -> mx.array:
    """Return the `count` best of C chunks per KV head, (H_kv, count), ascending, always with chunk 0.

    Passages cross the borders of chunks: a quarter of a score carries over to the next chunk.
    """
    scores = mx.concatenate([scores[:, :1], mx.maximum(scores[:, 1:], _CARRY * scores[:, :-1])], axis=1)
    scores[:, 0] = mx.inf
    chosen = mx.argpartition(-scores, min(count, scores.shape[1] - 1), axis=-1)[:, :count]
    return mx.sort(chosen, axis=-1)


class RetrievalKVCache(PositionedKVCache):
    """Chosen chunks, then a ring of exact recent tokens, then the draft's tokens; (1, H_kv, S, D).

    Its next position is that of the full cache. Positions of earlier tokens are not kept: keys keep their rotation.

    Args:
        source: the full cache; holds only committed tokens during `rebuild` and `follow`.
        budget: tokens of chosen chunks and ring together.
        chunk: tokens per chunk.
    """

    def __init__(self, source: PositionedKVCache | KVCache, budget: int, chunk: int) -> None:
        super().__init__()
        self.source = source
        self.chunk = chunk
        self.ring = max(2 * chunk, min(budget // 4, _MAX_RING))
        self.chunks = max(1, (budget - self.ring) // chunk)
        self.chosen: mx.array | None = None
        self._means: mx.array | None = None
        self._start = 0  # slot of the source at the ring's start

    @property
    def full(self) -> bool:
        """Return whether the ring has no room for the tokens generated since the last `rebuild`."""
        return self.empty() or _slots(self.source) - self._start > self.ring

    def rebuild(self, queries: mx.array) -> None:
        """Choose chunks again. queries (H, D): of the last token in the source."""
        candidates = max(0, _slots(self.source) - self.ring // 2) // self.chunk
        self._start = candidates * self.chunk
        self.chosen = self._choice(queries, candidates) if candidates else None
        self.inner = KVCache()
        if self.chosen is not None:
            keys, values = (self._gather(array, self.chosen) for array in (self.source.keys, self.source.values))
            self.inner.update_and_fetch(keys, values)
        self.follow()

    def follow(self) -> None:
        """Drop drafted tokens, and copy the ring from the source."""
        ring = slice(self._start, _slots(self.source))
        self.inner.offset = self._picked
        self.inner.update_and_fetch(self.source.keys[..., ring, :], self.source.values[..., ring, :])
        self.next = int(self.source.offset)
        self.held = HeldTokens([(self.next - self.slots, self.slots, False)])

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if window_size is not None:
            raise SparseUnsupportedError("a window over a full cache can't be kept when chunks are left out")
        return super().make_mask(N, return_array=return_array)

    @property
    def _picked(self) -> int:
        return 0 if self.chosen is None else int(self.chosen.shape[1]) * self.chunk

    def _choice(self, queries: mx.array, candidates: int) -> mx.array:
        scores = attention_shares(queries, self._mean_keys(candidates), 1)
        short = best_chunks(scores, min(_SHORTLIST * self.chunks, candidates))
        own = attention_shares(queries, self._gather(self.source.keys, short)[0], self.chunk)
        scores = mx.put_along_axis(mx.zeros_like(scores), short, own, axis=-1)
        return best_chunks(scores, min(self.chunks, candidates))

    def _mean_keys(self, count: int) -> mx.array:
        """Return the mean keys of the first `count` chunks, (H_kv, count, D). Each mean is computed once."""
        done = 0 if self._means is None else int(self._means.shape[1])
        if count > done:
            fresh: mx.array = self.source.keys[0, :, done * self.chunk : count * self.chunk]
            fresh = fresh.reshape(fresh.shape[0], -1, self.chunk, fresh.shape[-1]).mean(axis=2)
            self._means = fresh if self._means is None else mx.concatenate([self._means, fresh], axis=1)
        assert self._means is not None
        return self._means

    def _gather(self, array: mx.array, chunks: mx.array) -> mx.array:
        """Gather chunks (H_kv, n) of an array by token: gathering by chunk would copy the whole cache first."""
        slots = (chunks[..., None] * self.chunk + mx.arange(self.chunk)).reshape(1, array.shape[1], -1, 1)
        return mx.take_along_axis(array, slots, axis=2)


def _slots(source: PositionedKVCache | KVCache) -> int:
    return source.slots if isinstance(source, PositionedKVCache) else int(source.offset)


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
    def copied(self) -> list[Any]:
        """Return the caches of the chosen parts."""
        return list(self._small.values())

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
        self.caches = [self._mirror(part) for part in self.source]

    def _mirror(self, part: Any) -> Any:
        if isinstance(part, CacheList):
            return CacheList(*(self._mirror(inner) for inner in part.caches))
        small = self._small.get(id(part))
        if small is not None and not small.empty():
            return small
        mirrored = copy.copy(part)
        mirrored.state = copy.deepcopy(part.state)  # shares memory until one of the two is written
        return mirrored


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


class TriForceProposer(Proposer):
    """A small model drafts, the target on its retrieved cache verifies and corrects, and the result is proposed.

    Tokens that pass the inner verification have the distribution of the middle level, and are proposed with that
    distribution (the paper's CORRECT; its published code records the same one but draws from another after a
    rejection).
    """

    uses_draft = True

    def __init__(self, models: Models, prompt: TokenIds) -> None:
        self.model = models.target
        self.gamma = models.config.gamma2
        self.drafter = Drafter(models, prompt)
        self._config = models.config
        self._prompt = prompt
        self._retrieved: RetrievalPromptCache | None = None
        self._attention = AttentionRecord()

    @classmethod
    def refusal(cls, models: Models) -> str | None:
        quantized = "parts of a quantised cache can't be retrieved" if models.quantized else None
        return super().refusal(models) or quantized

    @classmethod
    def predict(cls, models: Models, prompt: int, tokens: int) -> Held:
        """The draft reads the prompt's ends, and a part of the target's cache is copied."""
        config = models.config
        skipped = max(0, prompt - config.sinks - config.window)
        return Held(draft=tokens - skipped, target=min(tokens, config.budget))

    @property
    def caches(self) -> Sequence[Any]:
        copied = [] if self._retrieved is None else self._retrieved.copied
        return [*self.drafter.cache, *copied]

    def start(self, cache: list[Any]) -> Generator[Progress, None, None]:
        config = self._config
        self.drafter.cache = yield from read_ends(self.drafter.model, self._prompt, config.sinks, config.window)
        self._retrieved = RetrievalPromptCache(cache, config)

    def record(self, target: Model) -> Model:
        def forward(tokens: mx.array, cache: Any) -> mx.array:
            with record_attention() as self._attention:
                return target(tokens, cache=cache)

        return forward

    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Proposal:
        proposal = Proposal()
        if self._retrieved is None or not self._retrieved.caches:
            return proposal  # the first forward is an ordinary one, whose queries choose the chunks
        while len(proposal.tokens) < count:
            so_far = [*text, *proposal.tokens]
            drafted = self.drafter.propose(so_far, self._config.gamma1, sampler)
            self._verify(self._retrieved.caches, so_far, drafted, proposal, sampler)
            if proposal.tokens[-1] in sampler.stops:
                break
        return proposal

    def _verify(
        self, caches: list[Any], text: list[int], drafted: Proposal, proposal: Proposal, sampler: TokenSampler
    ) -> None:
        """Run one inner round: append the kept tokens and the next one to `proposal`. Does not feed the last one."""
        rollback = Rollback(caches)
        logits = rollback.forward(self.model, mx.array([[text[-1], *drafted.tokens]]))
        distributions = sampler.distributions(logits, text, drafted.tokens)
        verdict = verify(distributions, drafted.distributions, drafted.tokens, sampler.rng)
        rollback.keep(1 + verdict.accepted)
        self.drafter.keep(len(text) + verdict.accepted)
        proposal.tokens.extend([*drafted.tokens[: verdict.accepted], verdict.token])
        proposal.distributions.extend(distributions[: verdict.accepted + 1])

    def accept(self, verified: Verified) -> None:
        assert self._retrieved is not None
        self.drafter.accept(verified)
        if verified.accepted < verified.proposed or self._retrieved.full:
            self._retrieved.rebuild(self._attention, verified.row)
        self._retrieved.follow()
