"""The bytes of a vocabulary's tokens, derived from the tokenizer's decoder.

Exact for byte-level BPE, for SentencePiece vocabularies (spaces as U+2581, bytes as <0xNN>), and for words joined by
spaces. Other decoders are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer

from ..errors import PairMismatchError
from ..request import TokenIds

__all__ = ["TokenBytes", "backend_of"]

Piece = Callable[[str], bytes]
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def backend_of(tokenizer: TokenizerWrapper) -> Tokenizer:
    """Return the implementation in the `tokenizers` library.

    Raises:
        PairMismatchError: it has another one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        kind = type(getattr(tokenizer, "_tokenizer", tokenizer)).__name__
        raise PairMismatchError(f"text can't be mapped by {kind}, which has no tokenizer.json")
    return backend


class TokenBytes:
    """The bytes of a tokenizer's tokens. Looks up each id once. Not thread-safe."""

    def __init__(self, tokenizer: TokenizerWrapper, special: bytes) -> None:
        """Args:
            special: bytes of special tokens. Other added tokens stand for their text.

        Raises:
            PairMismatchError: its decoder is of an unknown kind.
        """
        self._backend = backend_of(tokenizer)
        decoder = self._backend.decoder
        self._piece = _piece_by(None if decoder is None else json.loads(decoder.__getstate__()))
        added = self._backend.get_added_tokens_decoder().items()
        self._added = {index: special if token.special else token.content.encode() for index, token in added}
        self._known: dict[int, bytes] = {}

    def read(self, ids: Sequence[int] | TokenIds) -> tuple[bytes, npt.NDArray[np.int64]]:
        """Return the text of these tokens, and the end of each in it, int64 (M,). Unknown ids have no text."""
        tokens = np.asarray(ids, dtype=np.int32)
        unique, where = np.unique(tokens, return_inverse=True)
        pieces = [self[int(token)] for token in unique]
        lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
        return b"".join([self._known[token] for token in tokens.tolist()]), np.cumsum(lengths[where])

    def agrees(self, text: str) -> bool:
        """Return whether this text's tokens stand for the text that the tokenizer decodes, special tokens aside."""
        special = {index for index, token in self._backend.get_added_tokens_decoder().items() if token.special}
        ids = [token for token in self._backend.encode(text, add_special_tokens=False).ids if token not in special]
        said = self.read(ids)[0].decode(errors="replace")
        return said.strip(" ") == str(self._backend.decode(ids, skip_special_tokens=False)).strip(" ")

    def __getitem__(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._look_up(token)
        return self._known[token]

    def _look_up(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        piece = self._backend.id_to_token(token) if token >= 0 else None
        return b"" if piece is None else self._piece(piece)


def _piece_by(decoder: dict[str, Any] | None) -> Piece:
    """Return the conversion of a token's name to bytes by this decoder.

    Raises:
        PairMismatchError: the kind is unknown.
    """
    if decoder is None:
        return lambda piece: b" " + piece.encode()
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    texts = [_text_step(step) for step in steps if step["type"] in ("Replace", "Metaspace")]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _of_byte_level
    known = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
    # A step that strips the whole text comes after the one that joins the pieces.
    strips_pieces = "Strip" in kinds and "Fuse" not in kinds[: kinds.index("Strip")]
    if not texts or not known.issuperset(kinds) or strips_pieces:
        raise PairMismatchError(f"text can't be mapped by a tokenizer with the decoder {' + '.join(kinds)}")
    fallback = "ByteFallback" in kinds

    def piece_bytes(piece: str) -> bytes:
        if fallback and (found := _BYTE.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        for change in texts:
            piece = change(piece)
        return piece.encode()

    return piece_bytes


def _text_step(step: dict[str, Any]) -> Callable[[str], str]:
    """Return the function of a decoder's step on text.

    Raises:
        PairMismatchError: it replaces a pattern.
    """
    if step["type"] == "Metaspace":
        return lambda piece: piece.replace(step["replacement"], " ")
    old = step["pattern"].get("String")
    if old is None:
        raise PairMismatchError(f"text can't be mapped by a tokenizer whose decoder replaces {step['pattern']}")
    return lambda piece: piece.replace(old, step["content"])


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level vocabularies.

    GPT-2 chose them: printable bytes as they are, the others from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _of_byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in piece])
    except KeyError:  # an added token's own text
        return piece.encode()
