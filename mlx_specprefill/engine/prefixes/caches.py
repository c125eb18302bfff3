"""The engine's prefix caches, of target and draft: looks prompts up, stores what was read, forgets an owner's."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ...cache.budget import ByteBudget
from ...cache.held import HeldTokens
from ...cache.positioned import make_positioned_cache
from ...cache.prefix.disk import DiskTier
from ...cache.prefix.disk_policy import StoredPrefixCache
from ...cache.prefix.identity import model_identity
from ...cache.prefix.layout import Arrays
from ...cache.prefix.nodes import CacheEntry, CacheHit, Record
from ...cache.prefix.selection_key import SelectionKey, accepted_by
from ...cache.prefix.tree import PrefixCache, Restoring
from ...config import DraftWindow, EngineConfig
from ...errors import RequestCancelled, SettingsError, SparseUnsupportedError
from ...events import Progress, noop
from ...pair import ModelPair
from ...prefill_report import PrefixMiss, Stage
from ...request import CacheLabel, GenerationRequest, TokenIds
from ...speculative.strategies import drafts_with_draft
from .misses import WORTH_TELLING, Decode, explain_miss

log = logging.getLogger(__name__)
T = TypeVar("T")
Lookup = Generator[Progress, None, CacheHit | None]
LEAST_BYTES = 2 << 30  # for prefixes, where no other number is set
_ALIKE = 64  # tokens with which different insertions may begin: two tools do
_NOT_FOUND = "prefix look-up failed; the prompt is read from its start"


def empty_cache(model: nn.Module) -> list[Any]:
    """Return an empty prompt cache, with positions where the model allows it, so that any row can join any batch."""
    try:
        return make_positioned_cache(model)
    except SparseUnsupportedError:
        return list(make_prompt_cache(model))


def draft_window(pair: ModelPair, config: EngineConfig) -> DraftWindow | None:
    """Return the window within which the draft reads; None: it reads densely.

    Two drafts read densely: one that also proposes answers, and one without calibrated heads, which scores by the
    published rule.
    """
    dense = pair.draft is None or pair.heads is None or drafts_with_draft(config.speculation.strategy)
    return None if dense else config.scoring.window


class Erasure(IntEnum):
    """Progress of the disk with what was dropped. The least one of several ranks counts."""

    FAILED = 0
    PENDING = 1
    DONE = 2


class EngineCaches:
    """Looks up and stores prefixes. A failure costs the saved time, never the request. MLX thread only.

    An entry stored under a label is found under that label only. With a byte limit of 0 nothing is kept.

    Attributes:
        on_error: called for failures that cost no request.
    """

    def __init__(self, pair: ModelPair, config: EngineConfig) -> None:
        self.on_error: Callable[[Exception], None] = lambda _: None
        most = config.prefix_cache_bytes
        self.budget = ByteBudget(LEAST_BYTES if most is None else most)
        self.enabled = self.budget.most > 0
        self._unkept = 0.0  # the latest request that was not kept whole; see `GenerationRequest.made`
        self._pair = pair
        self._disk: DiskTier | None = None
        self._target: PrefixCache | None = None
        self._draft: PrefixCache | None = None
        self._selector_name = ""  # identifies the draft and its scoring
        self._forgotten: dict[str | None, float] = {}  # times by owner, None: everybody; see `GenerationRequest.made`
        self._erasing: Future[bool] | None = None
        if not self.enabled:
            return
        if config.prefix_cache_dir is not None:
            try:
                self._disk = DiskTier(self._folder(config.prefix_cache_dir), config.prefix_disk_bytes)
            except OSError as error:
                if not config.prefix_cache_optional:
                    raise SettingsError(f"the prefix cache folder can't be used: {error}") from error
                log.warning("no disk cache: %s", error)
        identity, draft_identity = self._identities(pair)
        empty = partial(empty_cache, pair.target)
        pinned_only = config.prefix_disk_pinned_only
        self._target = self._prefix_cache(pinned_only, identity, empty)
        if pair.draft is not None:
            empty = partial(make_prompt_cache, pair.draft)
            window = draft_window(pair, config)  # what is read within one serves no dense reading
            self._draft = self._prefix_cache(True, f"{draft_identity}{window or ''}", empty, kind="draft")
            rule = f"{draft_identity}:{config.selection}:{config.scoring}:{pair.heads}"
            self._selector_name = hashlib.blake2b(rule.encode(), digest_size=8).hexdigest()

    def _prefix_cache(
        self, only_pinned: bool, identity: str, empty: Callable[[], list[Any]], **settings: Any
    ) -> PrefixCache:
        if self._disk is None:
            return PrefixCache(identity, empty, self.budget, **settings)
        return StoredPrefixCache(self._disk, only_pinned, identity, empty, self.budget, later=True, **settings)

    def _identities(self, pair: ModelPair) -> tuple[str, str]:
        """Return the names under which prefixes of target and draft are stored; an empty one without a draft."""
        target = model_identity(pair.target, pair.target_config)
        return target, "" if pair.draft is None else model_identity(pair.draft, pair.draft_config or {})

    def _folder(self, folder: Path) -> Path:
        """Return the folder of prefixes that survive a restart."""
        return folder

    @property
    def nbytes(self) -> int:
        return self.budget.used

    @property
    def disk_nbytes(self) -> int:
        return 0 if self._disk is None else self._disk.nbytes

    def counts(self) -> dict[str, int]:
        """Return hits, misses and evictions since the start. May be called from any thread."""
        target = self._target
        return {
            "prefix_hits": 0 if target is None else target.hits,
            "prefix_misses": 0 if target is None else target.misses,
            "prefix_tokens": 0 if target is None else target.tokens_served,
            "evictions": self.budget.evictions,
            "disk_evictions": 0 if self._disk is None else self._disk.evictions,
        }

    def target_prefix(
        self,
        tokens: Sequence[int] | TokenIds,
        label: CacheLabel,
        again: bool = False,
        selection_key: SelectionKey | None = None,
    ) -> Lookup:
        """Return the longest prefix that leaves at least one token to feed. Yields while it is read from disk.

        Args:
            again: the same request looks up a second time; it is not counted.
            selection_key: `PrefillPlan.selection_key` of sparse prefixes that will do, too.
        """
        cache, name = self._target, self._full_key(selection_key)
        if cache is None:
            return None
        return (yield from self._look_up("queued", cache.restore(tokens, len(tokens) - 1, again, label, name), tokens))

    def draft_prefix(self, tokens: Sequence[int] | TokenIds, label: CacheLabel, again: bool = False) -> Lookup:
        """Return the longest prefix that the draft has read; `again` as in `target_prefix`. Yields as it does."""
        cache = self._draft
        if cache is None:
            return None
        return (yield from self._look_up("draft", cache.restore(tokens, len(tokens) - 1, again, label), tokens))

    def _look_up(self, stage: Stage, steps: Restoring[CacheHit | None], tokens: Sequence[int] | TokenIds) -> Lookup:
        """Return what the steps find; None if they fail."""
        try:
            while True:
                next(steps)
                yield Progress(stage, 0, len(tokens))
        except StopIteration as done:
            hit: CacheHit | None = done.value
            return hit
        except RequestCancelled:
            steps.close()
            raise
        except Exception as error:
            log.exception(_NOT_FOUND)
            self.on_error(error)
            return None

    def held(
        self, tokens: Sequence[int] | TokenIds, label: CacheLabel, selection_key: SelectionKey | None = None
    ) -> tuple[int, HeldTokens]:
        """Return the number of leading tokens that the target has cached now, and which of them it holds.

        Args:
            selection_key: as in `target_prefix`.
        """
        cache, name = self._target, self._full_key(selection_key)
        if cache is None:
            return 0, HeldTokens()
        return self._try(_NOT_FOUND, lambda: cache.held(tokens, label, name), (0, HeldTokens()))

    def covers(self, *wanted: Any) -> int:
        """Return the number of leading tokens that `held` would find."""
        return self.held(*wanted)[0]

    def draft_covers(self, tokens: Sequence[int] | TokenIds, label: CacheLabel) -> int | None:
        """Return the number of leading tokens that the draft has cached now; None: it has another tokenizer."""
        cache = self._draft if self._pair.mapping is None else None
        return None if cache is None else self._try(_NOT_FOUND, lambda: cache.covers(tokens, label), 0)

    def others(
        self, request: GenerationRequest, selection_key: SelectionKey | None
    ) -> list[tuple[TokenIds, HeldTokens]]:
        """Return the last used prompts that begin like this one and go on otherwise, each with the tokens that the
        target has of it: first dense ones, then those that the key accepts.
        """
        cache, label, key = self._target, request.label, self._full_key(selection_key)
        if cache is None:
            return []
        keys = (None,) if key is None else (None, key)
        others = (cache.others(request.prompt, label, accepts=accepted_by(one), less=_ALIKE)[1] for one in keys)
        found = [(prompt, *cache.held(prompt, label, key)) for prompts in others for prompt in prompts]
        return [(prompt[:length], held) for prompt, length, held in found]

    def miss(self, request: GenerationRequest, decode: Decode) -> PrefixMiss | None:
        """Return why the target reads cached tokens again. None: it reads none again, or the reason is unknown."""
        cache = self._target
        if cache is None:
            return None

        def explain() -> PrefixMiss | None:
            shared, others = cache.others(request.prompt, request.label)
            if not others or len(request.prompt) - shared < WORTH_TELLING:
                return None
            return explain_miss(request, (shared, others), decode)

        return self._try("the reason why a prompt is read again is unknown", explain, None)

    def keep_target(
        self,
        tokens: Sequence[int] | TokenIds,
        cache: list[Any],
        request: GenerationRequest,
        selection_key: SelectionKey | None = None,
        later: bool = False,
    ) -> Callable[[], object]:
        """Store a cache that holds exactly these tokens of a request and its answer; return what is left to do.

        Args:
            selection_key: `PrefillPlan.selection_key` of a sparse cache.
            later: store nothing, but return a function that stores the cache as it is now. The cache may hold more
                tokens when the function is called.
        """
        if self._target is None:
            return noop
        state = self._target.state(cache) if later else None
        store = partial(self._store, self._target, tokens, cache, request, state, selection_key)
        if later:
            return store
        store()
        return noop

    def keep_draft(self, tokens: Sequence[int] | TokenIds, cache: list[Any], request: GenerationRequest) -> None:
        if self._draft is not None:
            self._store(self._draft, tokens, cache, request)

    def _full_key(self, selection_key: SelectionKey | None) -> SelectionKey | None:
        """Return a selection key that is unique per draft and rule."""
        return None if selection_key is None else replace(selection_key, chooser=self._selector_name)

    def entries(self, owner: str | None = None) -> tuple[CacheEntry, ...]:
        """Return all entries, or those of one owner, most recently used first."""
        entries = [entry for cache in self._prefixes for entry in cache.entries()]
        ours = [entry for entry in entries if owner in (None, entry.label.owner)]
        return tuple(sorted(ours, key=lambda entry: entry.last_use, reverse=True))

    @property
    def _prefixes(self) -> list[PrefixCache]:
        return [cache for cache in (self._target, self._draft) if cache is not None]

    def drop(self, name: str, owner: str | None = None) -> bool:
        """Remove one entry from memory and disk; return False if the owner has none of that name."""
        found = any(cache.drop(name, owner) for cache in self._prefixes)
        if found and self._disk is not None:
            self._erasing = self._disk.erase()
        return found

    def clear(self, owner: str | None = None) -> None:
        """Remove all entries, or those of one owner, from memory and disk."""
        for cache in self._prefixes:
            cache.clear(owner)

    def forget(self, owner: str | None, at: float) -> None:
        """Clear the caches for good; `erasure` says how far the disk is.

        Args:
            at: what was asked before this time is not stored any more, by the monotonic clock of rank 0.
        """
        self._forgotten[owner] = at
        self.clear(owner)
        if self._disk is not None:
            self._erasing = self._disk.forget(owner)

    def keeps(self, request: GenerationRequest) -> bool:
        """Return whether what is read for a request is stored."""
        times = (self._forgotten.get(owner, -math.inf) for owner in (None, request.label.owner))
        return self.enabled and request.made > max(times)

    def erasure(self) -> Erasure:
        """Return whether what was dropped has left the disk."""
        if self._erasing is None or not self._erasing.done():
            return Erasure.DONE if self._erasing is None else Erasure.PENDING
        return Erasure.DONE if self._erasing.result() else Erasure.FAILED

    # --- to disk -----------------------------------------------------------------------------------------------------

    @property
    def has_unsaved(self) -> bool:
        """Return whether some of what is stored has to go to disk."""
        return any(cache.has_unsaved for cache in self._stored)

    def save_some(self) -> None:
        """Copy a few megabytes of what is stored for the disk."""
        for cache in self._stored:
            self._try("a prefix could not go to disk", cache.save_some, None)

    @property
    def _stored(self) -> list[StoredPrefixCache]:
        return [cache for cache in self._prefixes if isinstance(cache, StoredPrefixCache)]

    def close(self) -> None:
        if self._disk is None:
            return
        while self.has_unsaved:
            self.save_some()
            self._disk.flush()
        self._disk.close()

    def _store(
        self,
        cache: PrefixCache,
        tokens: Sequence[int] | TokenIds,
        arrays: list[Any],
        request: GenerationRequest,
        state: Arrays | None = None,
        selection_key: SelectionKey | None = None,
    ) -> None:
        if not self.keeps(request):
            return
        # What is read in idle time must not cost the turn that it belongs to.
        beside = [] if selection_key is not None else self.session(tokens, request.label)
        store = partial(
            cache.store,
            tokens,
            arrays,
            label=request.label,
            system_prefix_len=min(request.system_prefix_len, len(tokens)),
            state=state,
            selection_key=self._full_key(selection_key),
            beside=beside,
        )
        if not self._try("a prefix could not be stored", store, True) and request.made != self._unkept:
            self._unkept = request.made
            log.warning(
                "%d tokens can't all be kept in the prefix cache of %d MB, and are read again: "
                "--prefix-cache-size allows more",
                len(tokens),
                int(self.budget.limit) >> 20,
            )

    def session(self, tokens: Sequence[int] | TokenIds, label: CacheLabel) -> list[Record]:
        """Return what both models' caches hold of the longest beginning of these tokens, read in part or whole."""
        return [record for cache in self._prefixes for record in cache.records(tokens, label)]

    def _try(self, failure: str, call: Callable[[], T], otherwise: T) -> T:
        """Return the call's result. A failure is logged."""
        try:
            return call()
        except Exception as error:
            log.exception(failure)
            self.on_error(error)
            return otherwise
