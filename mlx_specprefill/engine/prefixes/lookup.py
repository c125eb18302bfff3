"""The beginning of a prompt that the target's cache holds: looked up by counts, and restored when it is read."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace

import numpy as np

from ...arrays import NO_INDICES, Indices, Positions
from ...cache.held import HeldTokens
from ...cache.prefix.nodes import CacheHit
from ...cache.prefix.selection_key import SelectionKey
from ...events import Progress
from ...pair import ModelPair
from ...prefill_report import PrefixMiss
from ...request import GenerationRequest
from ..estimating import Estimating
from .caches import EngineCaches, empty_cache
from .edited_prefix import Edit, EditedPrefixes


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The beginning of a prompt, as the cache has it: each token is read, estimated or absent.

    Attributes:
        length: prompt tokens that it covers.
        held: those that are read or estimated.
        key: of sparse prefixes that will do when it is restored; None: it is dense.
        edit: it stands behind this edit of another prompt; None: this prompt has it itself.
        change: another prompt's edit behind which text is to be kept, beside what will be chosen.
        rereads: its estimates are a map's, and may be read for a question; else they are kept as an edit left them.
        miss: why less is cached than the cache holds; None: for no reason known.
    """

    length: int = 0
    held: HeldTokens = field(default_factory=HeldTokens)
    key: SelectionKey | None = None
    edit: Edit | None = None
    change: Edit | None = None
    rereads: bool = False
    miss: PrefixMiss | None = None

    @property
    def is_dense(self) -> bool:
        return self.held.dense == self.length

    @property
    def unread(self) -> Indices:
        """Return the absent tokens that are to be read whatever is asked, ascending: an edit's."""
        return NO_INDICES if self.edit is None else self.edit.unread

    @property
    def settled(self) -> Positions:
        """Return the tokens that are not to be recalled: those that were read, and all that an edit keeps."""
        return self.held.read if self.rereads else self.held.positions

    @property
    def dropped(self) -> Indices:
        """Return the other tokens that were not read, ascending."""
        known = np.concatenate([self.settled, self.unread])
        return np.setdiff1d(np.arange(self.length, dtype=np.int32), known)

    def may_recall(self, request: GenerationRequest) -> bool:
        """Return whether something was dropped that the request may ask for."""
        return self.dropped.size > 0 and asks_anew(request, self.length)

    def behind(self, edit: Edit, key: SelectionKey | None) -> Prefix:
        """Return what the cache has behind an edit of another prompt.

        Args:
            key: of sparse prompts that will do.
        """
        miss = self.miss
        if miss is not None:
            miss = replace(miss, read_tokens=max(miss.read_tokens - edit.behind, 0))
        return Prefix(edit.length, edit.moved, key, edit, miss=miss)


class Prefixes:
    """Finds and restores them. MLX thread only."""

    def __init__(self, pair: ModelPair, caches: EngineCaches, estimating: Estimating) -> None:
        self._pair = pair
        self._caches = caches
        self._estimating = estimating
        self.edits = EditedPrefixes(pair, caches)

    def find_prefix(self, request: GenerationRequest, key: SelectionKey | None) -> Prefix:
        """Return the longest cached prefix: a dense one, or a sparse one that a selection key accepts. Reads nothing.

        A forced request means its newest message: of that it resumes only what another forced request chose.
        """
        limit = request.usable_prefix
        if key is not None and key.forced and self._is_repeated(request, key):
            limit = len(request.prompt) - 1
        elif key is not None:
            key = key.unforced
        length, held = self._caches.held(request.prompt[:limit], request.label, key)
        miss = self._caches.miss(request, self._pair.tokenizer.decode)
        return Prefix(length, held, None if held.dense == length else key, rereads=self.rereads(key), miss=miss)

    def rereads(self, key: SelectionKey | None) -> bool:
        """Return whether what a prefix of this key holds as estimates was made by a map, and may be read again."""
        return key is not None and key.estimates and self._estimating.is_used

    def _is_repeated(self, request: GenerationRequest, key: SelectionKey) -> bool:
        """Return whether the same prompt was read before with the same selection key."""
        prompt = request.prompt[:-1]
        sparse, dense = (self._caches.held(prompt, request.label, one)[0] for one in (key, None))
        return dense < prompt.size <= sparse

    def restore_prefix(
        self, request: GenerationRequest, prefix: Prefix, again: bool = False
    ) -> Generator[Progress, None, CacheHit]:
        """Return a cache with the prefix, or with what is left of it: it may have been evicted since it was found.

        Args:
            again: as in `EngineCaches.target_prefix`.
        """
        hit = None
        if prefix.edit is not None:
            hit = yield from self.edits.restore(request, prefix.edit, prefix.key)
        elif prefix.length or request.usable_prefix:  # a look-up that finds nothing is counted
            wanted = request.prompt[: prefix.length + 1]
            hit = yield from self._caches.target_prefix(wanted, request.label, again, prefix.key)
        return CacheHit(0, empty_cache(self._pair.target), HeldTokens()) if hit is None else hit


def asks_anew(request: GenerationRequest, start: int) -> bool:
    """Return whether a user message or a question follows the prompt's first `start` tokens: tool results ask nothing,
    and neither does a prompt that was read before.
    """
    if request.questions:
        return True
    if start == len(request.prompt) - 1:
        return False
    return not request.spans or any(span.kind == "user" and span.content_end > start for span in request.spans)
