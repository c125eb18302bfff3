"""The engine's memory between requests: dense prefixes of target and draft, and sparse sessions, in one byte budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..cache.budget import ByteBudget
from ..cache.entry import CacheEntry, CacheHit
from ..cache.positioned import PositionedKVCache, leaves, make_positioned_cache
from ..cache.prefix.disk import DiskTier
from ..cache.prefix.nodes import model_identity
from ..cache.prefix.records import Arrays
from ..cache.prefix.tree import PrefixCache
from ..config import EngineConfig
from ..errors import SettingsError, SparseUnsupportedError
from ..loading import ModelPair
from ..request import CacheLabel, GenerationRequest, TokenIds
from ..sessions.store import Session, SessionStore
from ..specprefill.staged_prefill import HiddenStates

__all__ = ["EngineCaches", "empty_cache", "empty_draft_cache"]

log = logging.getLogger(__name__)


def empty_cache(model: nn.Module) -> list[Any]:
    """With positions where the model allows it, so that every row can join every batch."""
    try:
        return make_positioned_cache(model)
    except SparseUnsupportedError:
        return list(make_prompt_cache(model))


def empty_draft_cache(pair: ModelPair) -> list[Any]:
    """With positions where it becomes a part of the target's."""
    assert pair.draft is not None
    return make_positioned_cache(pair.draft) if pair.stages is not None else list(make_prompt_cache(pair.draft))


class EngineCaches:
    """Looks up and stores; a failure costs the saving, never the request. MLX thread only.

    What is stored under a label is found under that label only. With a byte limit of 0 nothing is kept.

    Attributes:
        on_error: told of failures that cost no request.
    """

    def __init__(self, pair: ModelPair, config: EngineConfig) -> None:
        self.on_error: Callable[[Exception], None] = lambda _: None
        self.budget = ByteBudget(config.prefix_cache_bytes)
        self.enabled = config.prefix_cache_bytes > 0
        self.sessions = SessionStore(self.budget)
        self._stages = pair.stages
        self._disk: DiskTier | None = None
        self._target: PrefixCache | None = None
        self._draft: PrefixCache | None = None
        if not self.enabled:
            return
        if config.prefix_cache_dir is not None:
            self._disk = DiskTier(self._folder(config.prefix_cache_dir), config.prefix_disk_bytes)
            if not self._disk.enabled and not config.prefix_cache_optional:
                raise SettingsError(f"the prefix cache folder can't be used: {self._disk.trouble}")
        identity, draft_identity = self._identities(pair)
        self._target = PrefixCache(
            identity,
            lambda: empty_cache(pair.target),
            self.budget,
            self._disk,
            only_lasting=config.prefix_disk_lasting,
        )
        self._pair_name = identity
        if pair.draft is not None:
            # The draft costs little to run again: its prefixes stay in memory.
            assert draft_identity is not None
            self._draft = PrefixCache(draft_identity, lambda: empty_draft_cache(pair), self.budget, kind="draft")
        if pair.drafted:
            self._pair_name = f"{identity}:{draft_identity}:{config.selection}:{config.scoring}:{pair.heads}"

    def _identities(self, pair: ModelPair) -> tuple[str, str | None]:
        """Return the names under which target and draft have their prefixes."""
        target = model_identity(pair.target, pair.target_config)
        return target, None if pair.draft is None else model_identity(pair.draft, pair.draft_config or {})

    def _folder(self, folder: Path) -> Path:
        """Return where prefixes outlive the process."""
        return folder

    @property
    def nbytes(self) -> int:
        return self.budget.used

    @property
    def disk_nbytes(self) -> int:
        return 0 if self._disk is None else self._disk.nbytes

    def counts(self) -> dict[str, int]:
        """Hits, misses and evictions since the start, and the sessions there are; from any thread."""
        target = self._target
        return {
            "prefix_hits": 0 if target is None else target.hits,
            "prefix_misses": 0 if target is None else target.misses,
            "prefix_tokens": 0 if target is None else target.tokens_served,
            "sessions": len(self.sessions),
            "evictions": self.budget.evictions,
            "disk_evictions": 0 if self._disk is None else self._disk.evictions,
        }

    def reclaim(self, nbytes: int) -> None:
        """Let go of at least that many bytes, if there are as many."""
        self.budget.shrink(nbytes)

    def target_prefix(
        self, tokens: Sequence[int] | TokenIds, label: CacheLabel, again: bool = False
    ) -> CacheHit | None:
        """The longest dense prefix that leaves at least one token to feed. `again`: not a request of its own."""
        return self._lookup(self._target, tokens, label, again)

    def draft_prefix(self, tokens: Sequence[int] | TokenIds, label: CacheLabel) -> CacheHit | None:
        """Return the longest prefix that the draft has read."""
        return self._lookup(self._draft, tokens, label)

    def covers(self, tokens: Sequence[int] | TokenIds, dense: int, label: CacheLabel) -> int:
        """Return how many of these tokens need not be read again, as things stand.

        Args:
            dense: of how many a dense prefix may be used.
        """
        try:
            prefix = 0 if self._target is None else self._target.covers(tokens[:dense], label)
            return max(prefix, self.sessions.covers(tokens, label))
        except Exception:
            log.exception("looking up what is cached of a prompt failed")
            return 0

    def keep_target(self, tokens: Sequence[int] | TokenIds, cache: list[Any], request: GenerationRequest) -> None:
        """Store a cache that holds exactly these tokens of a request, and of its answer, densely."""
        self._store(self._target, tokens, cache, request)

    def keep_target_later(
        self, tokens: Sequence[int] | TokenIds, cache: list[Any], request: GenerationRequest
    ) -> Callable[[], None] | None:
        """The same, when the result is called: the cache holds exactly these tokens now, and may hold more by then."""
        if self._target is None:
            return None
        return partial(self._store, self._target, tokens, cache, request, self._target.state(cache))

    def keep_draft(self, tokens: Sequence[int] | TokenIds, cache: list[Any], request: GenerationRequest) -> None:
        self._store(self._draft, tokens, cache, request)

    def session(
        self, tokens: Sequence[int] | TokenIds, choice: str, label: CacheLabel, staged: bool = False
    ) -> Session | None:
        """Return the sparse turn, made with the same `PrefillPlan.choice`, that stands for the most of these tokens.

        Args:
            staged: of the layers behind the first ones alone, which is what a staged turn leaves.
        """
        if not self.enabled:
            return None
        hit = self.sessions.lookup(f"{self._pair_name}:{choice}", tokens, label)
        if hit is None:
            return None
        hidden = hit.cache.pop() if isinstance(hit.cache[-1], HiddenStates) else None
        if staged and hidden is None:
            return None
        full = next((part for part in leaves(hit.cache) if isinstance(part, PositionedKVCache)), None)
        return None if full is None else Session(hit.length, hit.cache, full.runs.expand(), hidden)

    def session_length(self, tokens: Sequence[int] | TokenIds, choice: str, label: CacheLabel) -> int:
        """Return for how many of these tokens `session` would find one."""
        return self.sessions.covers(tokens, label, f"{self._pair_name}:{choice}") if self.enabled else 0

    def keep_session(
        self,
        tokens: Sequence[int] | TokenIds,
        cache: list[Any],
        choice: str,
        label: CacheLabel,
        hidden: HiddenStates | None = None,
    ) -> None:
        """Store a sparse cache under the tokens it stands for; it never answers a dense request.

        Args:
            hidden: of a staged prefill, what its first layers passed on. These hold everything and are left out: the
                draft's prefixes have them.
        """
        if not self.enabled:
            return
        if hidden is not None and self._stages is not None:
            hidden.end = len(tokens)
            cache = [*self._stages.split(cache)[1], hidden]
        try:
            self.sessions.store(f"{self._pair_name}:{choice}", tokens, cache, label)
        except Exception as error:
            log.exception("a session could not be stored")
            self.on_error(error)

    def entries(self, owner: str | None = None) -> tuple[CacheEntry, ...]:
        """All that is kept, or what is kept of one owner's, last used first."""
        prefixes = [entry for cache in self._prefixes for entry in cache.entries()]
        ours = [e for e in (*self.sessions.entries(), *prefixes) if owner in (None, e.label.owner)]
        return tuple(sorted(ours, key=lambda entry: entry.last_use, reverse=True))

    @property
    def _prefixes(self) -> list[PrefixCache]:
        return [cache for cache in (self._target, self._draft) if cache is not None]

    def drop(self, name: str, owner: str | None = None) -> bool:
        """Forget one entry, in memory and on disk; False when there is none of that name, or not of that owner's."""
        return any(cache.drop(name, owner) for cache in self._prefixes) or self.sessions.drop(name, owner)

    def clear(self, owner: str | None = None) -> None:
        """Forget every prefix and session, or those of one owner, in memory and on disk."""
        self.sessions.clear(owner)
        for cache in self._prefixes:
            cache.clear(owner)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def _lookup(
        self, cache: PrefixCache | None, tokens: Sequence[int] | TokenIds, label: CacheLabel, again: bool = False
    ) -> CacheHit | None:
        if cache is None:
            return None
        try:
            return cache.lookup(tokens, len(tokens) - 1, again, label)
        except Exception as error:
            log.exception("prefix look-up failed; the prompt is read from its start")
            self.on_error(error)
            return None

    def _store(
        self,
        cache: PrefixCache | None,
        tokens: Sequence[int] | TokenIds,
        arrays: list[Any],
        request: GenerationRequest,
        state: Arrays | None = None,
    ) -> None:
        if cache is None:
            return
        try:
            opening = min(request.opening, len(tokens))
            cache.store(tokens, arrays, label=request.label, opening=opening, remember=request.remember, state=state)
        except Exception as error:
            log.exception("a prefix could not be stored")
            self.on_error(error)
