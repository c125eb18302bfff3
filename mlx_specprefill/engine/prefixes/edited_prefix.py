"""A cached prompt that a new one edits, as its prefix: what follows the new text stays, at its new place.

The new text is read, and the beginning of each passage behind it, where what was read before fits least. All else keeps
the keys and values that it has. So the target sees the whole prompt, a part of it as it was read without the new text.
Where text was removed or changed, what follows was read with it, and may hold it still: there what the draft chooses
for the question is read anew, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from ...adapters.moved_keys import LayerRotation, Piece, movable_layers, move, moved_tokens
from ...arrays import NO_INDICES, Bools
from ...cache.held import HeldTokens
from ...cache.prefix.nodes import CacheHit, common_length
from ...cache.prefix.selection_key import SelectionKey
from ...cache.prefix.tree import held_by
from ...errors import Refused, SparseUnsupportedError
from ...pair import ModelPair
from ...request import GenerationRequest, TokenIds
from .caches import EngineCaches, Lookup
from .edits import kept_passages
from .misses import WORTH_TELLING

_TAIL = 64  # last tokens of a prompt, which ask
_SEAM = Fraction(1, 10)  # of what is cached of each passage behind an insertion, that is read anew
_EDGE = 64  # first tokens of each passage that are read anew beside what the draft chooses
_WORD = 8  # tokens on both sides of a place that are read to see whether it is inside a word


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """A cached prompt and the parts of it that a new prompt keeps.

    Attributes:
        cached: the tokens of the cached prompt, as far as they are looked up.
        held: those that the target has.
        size: tokens of the new prompt.
        start: tokens that both prompts begin with.
        pieces: kept, of what both prompts begin with and of each passage behind an edit.
        passages: the same behind an edit, with what the target has to read of them.
        unread: indices in front of the last kept token that the target has to read, ascending.
        later: those behind it.
        reused: tokens behind the first edit that the target keeps.
    """

    cached: TokenIds
    held: HeldTokens
    size: int
    start: int
    pieces: tuple[Piece, ...]
    passages: tuple[Piece, ...]
    unread: TokenIds
    later: TokenIds
    reused: int

    def around(self, chosen: TokenIds) -> Edit:
        """Return the same edit beside what the draft chose to be read, by indices of the new prompt, ascending."""
        return make_edit(self.size, self.cached, self.held, self.start, self.passages, chosen)

    @property
    def moved(self) -> HeldTokens:
        """Return the tokens of the new prompt that the target has, those behind the first edit as estimates."""
        return moved_tokens(self.held, self.pieces, int(self.unread[0]))

    @property
    def read(self) -> int:
        """Return the tokens of the new prompt that the target has to read."""
        return self.unread.size + self.later.size

    @property
    def length(self) -> int:
        """Return the tokens of the new prompt up to the last kept one."""
        return self.pieces[-1].new + self.pieces[-1].size if self.pieces else 0

    @property
    def behind(self) -> int:
        """Return the tokens behind the first edit that stay as they are, dropped ones included."""
        return self.length - int(self.unread[0]) - self.unread.size if self.unread.size else 0

    @property
    def inserted(self) -> int:
        """Return the tokens in front of passages that are new."""
        last = self.passages[-1]
        return last.new + last.size - int(self.unread[0]) - sum(passage.size for passage in self.passages)

    @property
    def is_sparse(self) -> bool:
        """Return whether some of the cached prompt was dropped."""
        return self.held.size < self.cached.size

    @property
    def is_thin(self) -> bool:
        """Return whether less than half of the text behind the first edit is cached."""
        seam = self.unread.size - self.inserted
        return 2 * (self.reused + seam) < self.behind + seam

    @property
    def words(self) -> str:
        """Return what is done."""
        kept = f"{self.reused} tokens" if not self.is_sparse else f"{self.reused} of {self.behind} tokens"
        left = ", the others were never read" if self.is_sparse else ""
        return f"{kept} behind an edit are kept as they were read{left}; {self.read} are read"


class EditedPrefixes:
    """Finds and restores them. MLX thread only."""

    def __init__(self, pair: ModelPair, caches: EngineCaches) -> None:
        self._pair = pair
        self._caches = caches
        self._rotations: dict[str, list[LayerRotation] | Refused] = {}  # those that were tried

    def find(
        self, request: GenerationRequest, selection_key: SelectionKey | None, chosen: TokenIds | None = None
    ) -> Edit | None:
        """Return the cached prompt of which most can be kept; None if that is not worth it, or the model can't.

        Behind an insertion all was read with text that this prompt has, too. Behind another edit it was read with text
        that this prompt lacks, which must not be another party's.

        Args:
            selection_key: of sparse prompts that will do, too.
            chosen: indices that the draft may choose to be read, ascending; None: no text may be removed or changed.
        """
        if chosen is not None and not request.label.is_of_one:
            return None
        others = self._caches.others(request, selection_key)
        found = [self._edit(request.prompt, *other, chosen) for other in others]
        best = max(found, key=lambda edit: edit.reused, default=None)
        if best is None or best.behind < WORTH_TELLING or best.reused == 0 or isinstance(self.layers(), Refused):
            return None
        return best

    def restore(self, request: GenerationRequest, edit: Edit, selection_key: SelectionKey | None) -> Lookup:
        """Return the cached prompt as a sparse prefix of the new one; None if it is no longer there.

        Args:
            selection_key: as in `find`.
        """
        wanted, rotations = np.append(edit.cached, np.int32(0)), self.layers()
        hit = yield from self._caches.target_prefix(wanted, request.label, True, selection_key)
        if hit is None or isinstance(rotations, Refused) or edit.held.runs() != hit.held.runs():
            return None
        move(hit.cache, rotations, edit.pieces, int(edit.unread[0]))
        return CacheHit(edit.length, hit.cache, held_by(hit.cache))

    def settle(self, cache: Sequence[Any], edit: Edit) -> None:
        """Store what was read in front of kept tokens where the prompt has it: shorter prompts find it there, too.

        The first two change places, so that the dense beginning ends in front of the edit: behind a longer one no other
        cached prompt would be looked for.
        """
        if not isinstance(rotations := self.layers(), Refused):
            first, then = edit.unread[:2].tolist()
            ranges = (0, first), (then, then + 1), (first, then), (then + 1, edit.length)
            move(cache, rotations, [Piece(start, start, end - start) for start, end in ranges])

    def movable(self, selection_key: SelectionKey | None) -> SelectionKey | None:
        """Return the key of sparse prompts that can be moved with the draft's; None if only dense ones can.

        The draft has to know what was dropped, or nobody could ask for it later.
        """
        is_known = selection_key is not None and not isinstance(self.layers("draft"), Refused)
        return selection_key if is_known else None

    def _edit(self, prompt: TokenIds, old: TokenIds, held: HeldTokens, chosen: TokenIds | None = None) -> Edit:
        """Return what a prompt keeps of another one, up to the first place where it changes some of its text, or beside
        what is chosen.
        """
        start = common_length(prompt, old)
        passages = tuple(self._passages(prompt, old, start, chosen is not None))
        return make_edit(prompt.size, old, held, start, passages, chosen)

    def _passages(self, prompt: TokenIds, old: TokenIds, start: int, changed: bool) -> Iterator[Piece]:
        """Yield the passages behind an edit; unless some text may be changed, up to the first place where it is."""
        end = read_to = start
        for passage in kept_passages(prompt[:-_TAIL], old, start):
            if not changed and (passage.old > end or self._is_change(old, end, prompt, read_to, passage.new)):
                return
            yield passage
            end, read_to = passage.old + passage.size, passage.new + passage.size

    def _is_change(self, old: TokenIds, place: int, new: TokenIds, start: int, end: int) -> bool:
        """Return whether tokens [start, end) inserted at a place make another word there, as a further digit does.

        They do not if they end with the word's first tokens: then they stand in front of it.
        """
        for back in range(_WORD):
            if not np.array_equal(new[end - back : end], old[place - back : place]):
                break
            if not any(self._is_in_word(*at) for at in ((old, place - back), (new, start - back), (new, end - back))):
                return False
        return True

    def _is_in_word(self, tokens: TokenIds, place: int) -> bool:
        first, decode = max(place - _WORD, 0), self._pair.tokenizer.decode
        before = len(decode(tokens[first:place].tolist()))
        text = decode(tokens[first : place + _WORD].tolist())
        return before > 0 and text[before - 1 : before].isalnum() and text[before : before + 1].isalnum()

    def layers(self, of: Literal["target", "draft"] = "target") -> list[LayerRotation] | Refused:
        """Return the rotation of each of a model's layers, probed once, or why keys can't be moved."""
        if of not in self._rotations:
            self._rotations[of] = self._try_layers(of)
        return self._rotations[of]

    def _try_layers(self, of: Literal["target", "draft"]) -> list[LayerRotation] | Refused:
        pair = self._pair
        if pair.ranks is not None:
            return Refused("the target runs on several machines")
        model = pair.target if of == "target" else pair.draft
        if model is None or (of == "draft" and pair.mapping is not None):
            return Refused("the draft has no cached prompts of its own, or in other tokens")
        try:
            return movable_layers(model)
        except SparseUnsupportedError as error:
            return Refused(str(error))


def make_edit(
    size: int, old: TokenIds, held: HeldTokens, start: int, passages: tuple[Piece, ...], chosen: TokenIds | None
) -> Edit:
    """Return the edit that leaves these passages of an old prompt's tokens `old`.

    Args:
        size, start: as in `Edit`.
        chosen: as in `EditedPrefixes.find`.
    """
    end = read_to = start
    holds = np.bincount(held.positions, minlength=old.size) > 0
    wanted = None if chosen is None else np.bincount(chosen, minlength=size) > 0
    pieces, unread, reused = [Piece(0, 0, start)] if start else [], [NO_INDICES], 0
    for passage in passages:
        unread.append(np.arange(read_to, passage.new, dtype=np.int32))
        end, read_to = passage.old + passage.size, passage.new + passage.size
        cached = holds[passage.old : end]
        again = _anew(cached, None if wanted is None else wanted[passage.new : read_to])
        unread.append((np.flatnonzero(again) + passage.new).astype(np.int32))
        edges = np.flatnonzero(np.diff(~again, prepend=False, append=False)).tolist()
        stays = zip(edges[::2], edges[1::2], strict=True)
        pieces += [Piece(passage.old + first, passage.new + first, last - first) for first, last in stays]
        reused += int(np.count_nonzero(cached & ~again))
    unread.append(np.arange(read_to, size, dtype=np.int32) if chosen is None else chosen[chosen >= read_to])
    anew = np.concatenate(unread)
    behind = anew >= (pieces[-1].new + pieces[-1].size if pieces else 0)
    if held.dense >= end:  # else some of it may have been recalled for a later token
        old, held = old[:end], HeldTokens.all(end)
    return Edit(old, held, size, start, tuple(pieces), passages, anew[~behind], anew[behind], reused)


def _anew(cached: Bools, chosen: Bools | None) -> Bools:
    """Return which tokens of a passage are read anew."""
    if chosen is None:
        return cached & np.less_equal(np.cumsum(cached), math.ceil(int(np.count_nonzero(cached)) * _SEAM))
    return chosen | (np.arange(chosen.size) < _EDGE)
