"""A cached prompt that a new one inserts text into, as its prefix: what follows the new text stays, at its new place.

The new text is read, and the beginning of each passage behind it, where what was read before fits least. All else keeps
the keys and values that it has. So the target sees the whole prompt, a part of it as it was read without the new text.
Where text was removed or changed, what follows was read with it, and may hold it still: from there on all is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ..adapters.moved_keys import LayerRotation, Piece, layer_rotations, move
from ..cache.prefix.nodes import CacheHit, common_length
from ..errors import Refused, SparseUnsupportedError
from ..loading import ModelPair
from ..request import GenerationRequest, TokenIds
from .caches import EngineCaches, Lookup
from .edits import kept_passages
from .misses import WORTH_TELLING

_TAIL = 64  # last tokens of a prompt, which ask
_WORD = 8  # tokens on both sides of a place that are read to see whether it is inside a word


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """A cached prompt and the parts of it that a new prompt keeps.

    Attributes:
        cached: the tokens of the cached prompt, up to the last ones that are kept.
        start: tokens that both prompts begin with.
        pieces: kept behind an edit.
        read: tokens of the new prompt that the target has to read.
    """

    cached: TokenIds
    start: int
    pieces: tuple[Piece, ...]
    read: int

    @property
    def reused(self) -> int:
        """Return the number of tokens that are kept behind an edit."""
        return sum(piece.size for piece in self.pieces)


class EditedPrefixes:
    """Finds and restores them. MLX thread only."""

    def __init__(self, pair: ModelPair, caches: EngineCaches) -> None:
        self._pair = pair
        self._caches = caches
        self._rotations: list[LayerRotation] | Refused | None = None  # None: not tried yet

    def find(self, request: GenerationRequest, share: Fraction) -> Edit | None:
        """Return the cached prompt of which most can be kept; None if that is not worth it, or the model can't.

        Args:
            share: of each passage behind an edit, that is read anew.
        """
        found = [self._edit(request.prompt, old, share) for old in self._caches.others(request)]
        best = max(found, key=lambda edit: edit.reused, default=None)
        if best is None or best.reused < WORTH_TELLING or isinstance(self.layers(), Refused):
            return None
        return best

    def restore(self, request: GenerationRequest, edit: Edit) -> Lookup:
        """Return the cached prompt as a sparse prefix of the new one; None if it is no longer there."""
        size, rotations = edit.cached.size, self.layers()
        hit = yield from self._caches.target_prefix(np.append(edit.cached, np.int32(0)), request.label, again=True)
        if hit is None or hit.length != size or isinstance(rotations, Refused):
            return None
        pieces = (Piece(0, 0, edit.start), *edit.pieces) if edit.start else edit.pieces
        move(hit.cache, rotations, pieces)
        held = np.concatenate([np.arange(piece.new, piece.new + piece.size, dtype=np.int32) for piece in pieces])
        return CacheHit(pieces[-1].new + pieces[-1].size, hit.cache, held)

    def _edit(self, prompt: TokenIds, old: TokenIds, share: Fraction) -> Edit:
        """Return what a prompt keeps of another one, up to the first place where it changes some of its text."""
        end = start = read_to = common_length(prompt, old)
        pieces = list[Piece]()
        for passage in kept_passages(prompt[:-_TAIL], old, start):
            if self._is_change(old, end, prompt, read_to, passage.new):
                break
            end, read_to = passage.old + passage.size, passage.new + passage.size
            seam = math.ceil(passage.size * share)
            pieces.append(Piece(passage.old + seam, passage.new + seam, passage.size - seam))
        kept = sum(piece.size for piece in pieces)
        return Edit(old[:end], start, tuple(pieces), prompt.size - start - kept)

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

    def layers(self) -> list[LayerRotation] | Refused:
        """Return each layer's rotation, probed once, or why keys can't be moved."""
        if self._rotations is None:
            self._rotations = self._try_layers()
        return self._rotations

    def _try_layers(self) -> list[LayerRotation] | Refused:
        if self._pair.ranks is not None:
            return Refused("the target runs on several machines")
        try:
            return layer_rotations(self._pair.target)
        except SparseUnsupportedError as error:
            return Refused(str(error))
