"""From the texts that no repetition crosses (`dry_sequence_breakers`) to tokens, as llama.cpp does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from .generation.reader import Vocabulary

_LONGEST_TEXT = 40  # bytes; llama.cpp cuts there
_LONGEST_TAIL = 20  # tokens, likewise


@lru_cache(maxsize=8)
def breaker_tokens(vocabulary: Vocabulary, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return all token sequences that contain one of the texts, from the token in which it begins on.

    Reads the whole vocabulary: some tenths of a second.
    """
    cut = [text.encode()[:_LONGEST_TEXT] for text in texts]
    pieces = [bytes(vocabulary.token_bytes(token)) for token in range(vocabulary.size)]
    found = (
        (token, *tail)
        for text in cut
        for token, piece in enumerate(pieces)
        if text[:1] in piece
        for tail in _tails(vocabulary, piece, text)
    )
    return tuple(dict.fromkeys(found))


def _tails(vocabulary: Vocabulary, piece: bytes, text: bytes) -> Iterator[tuple[int, ...]]:
    """Yield the tokens that complete a text which begins in a token's bytes; none if it ends there, too."""
    if text in piece:
        yield ()
        return
    for size in range(1, min(len(piece), len(text) - 1) + 1):
        if piece.endswith(text[:size]):
            yield tuple(vocabulary.encode(text[size:].decode(errors="ignore"))[:_LONGEST_TAIL])
