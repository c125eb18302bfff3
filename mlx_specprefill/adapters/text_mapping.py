"""Compares two tokenizers, and converts a target's tokens to text for a draft with another one.

The target's special tokens become line breaks in that text, so that two messages don't run together. The draft's chat
template is not applied; the start token of its tokenizer is. No text of the prompt becomes a special token of the
draft.

The bytes of tokens are derived from the tokenizer's decoder: exactly for byte-level BPE, for SentencePiece vocabularies
(spaces as U+2581, bytes as <0xNN>), and for words joined by spaces. Other decoders are refused by name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Any

import numpy as np
import numpy.typing as npt
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..arrays import Ends
from ..errors import PairMismatchError, SparseUnsupportedError
from ..request import TokenIds
from .backend import encode_text

Piece = Callable[[str], bytes]
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")

_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


LEAST_ALIGNED = 0.999  # share of bytes
_BREAK, _UNKNOWN = b"\n", b"\0"  # text of the target's special tokens, and of the draft's
_UNDECODABLE = re.compile("[\udc80-\udcff]")
# English and code, to measure the ratio of draft tokens to target tokens.
_PLAIN = """\
The committee met on 14 March 2024 to discuss the report. Nobody had expected that the figures would differ so much from
those of the previous year; the chairwoman asked whether "estimated" meant what it usually means. It didn't.

def mean(values: Sequence[float], default: float = 0.0) -> float:
    '''The arithmetic mean; `default` without values.'''
    total = sum(value for value in values if value is not None)
    return total / len(values) if values else default

{"name": "Zoë", "items": [1, 2.5, -3e7], "path": "/usr/local/lib/python3.11", "done": true, "next": null}
"""
# Texts on which tokenizers differ: scripts, joined and decomposed characters, spaces, line ends, control characters.
_SCRIPTS = """\
Déjà vu, naïve, Łódź, straße, İstanbul, tiếng Việt; decomposed: e\u0301 n\u0303 A\u030a \u1100\u1161\u11a8.
Все счастливые семьи похожи. Όλοι οι άνθρωποι. Հայերեն. ქართული.
בראשית ברא. بِسْمِ الله. हिन्दी भाषा. বাংলা. தமிழ். ภาษาไทย. မြန်မာ.
中文文本，繁體字。日本語の文章です。カタカナ、ｶﾅ。한국어 문장입니다.
🙂 👩\u200d💻 🏳\ufe0f\u200d🌈 🇩🇪 𝒜 ∫∂x ≤ ﬁ ™ ½ ① € “quoted” – — …
\t  two  spaces,\ttab\r\n\r\nline ends


   \u00a0\u3000wide spaces \u200b|\u2028|\u0085| 12345.67 x_y=(a+b)[0]; <|im_start|> </s> <unk> [UNK] don't
"""

# Text on which two tokenizers with one vocabulary can still differ: normalisers, pre-tokenizers, merges.
_PROBE_TEXT = "Hello  World\n\tdéjà vu 12345.67 don't 中文 🙂 x_y=(a+b)[0]; ﬁ <|im_start|>"

log = logging.getLogger(__name__)


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


class TokenBytes(dict[int, bytes]):
    """The bytes of a tokenizer's tokens. Looks up each id once. Not thread-safe."""

    def __init__(self, tokenizer: TokenizerWrapper, special: bytes) -> None:
        """Args:
            special: bytes of special tokens. Other added tokens stand for their text.

        Raises:
            PairMismatchError: its decoder is of an unknown kind.
        """
        super().__init__()
        self._backend = backend_of(tokenizer)
        decoder = self._backend.decoder
        self._piece = _piece_by(None if decoder is None else json.loads(decoder.__getstate__()))
        added = self._backend.get_added_tokens_decoder().items()
        self._added = {index: special if token.special else token.content.encode() for index, token in added}

    def read(self, ids: Sequence[int] | TokenIds) -> tuple[bytes, npt.NDArray[np.int64]]:
        """Return the text of these tokens, and the end of each in it, int64 (M,). Unknown ids have no text."""
        tokens = np.asarray(ids, dtype=np.int32)
        unique, where = np.unique(tokens, return_inverse=True)
        pieces = [self[int(token)] for token in unique]
        lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
        return b"".join([self[token] for token in tokens.tolist()]), np.cumsum(lengths[where])

    def agrees(self, text: str) -> bool:
        """Return whether this text's tokens stand for the text that the tokenizer decodes, special tokens aside."""
        special = {index for index, token in self._backend.get_added_tokens_decoder().items() if token.special}
        ids = [token for token in encode_text(self._backend, text)[0] if token not in special]
        text_of_bytes = self.read(ids)[0].decode(errors="replace")
        return text_of_bytes.strip(" ") == str(self._backend.decode(ids, skip_special_tokens=False)).strip(" ")

    def __missing__(self, token: int) -> bytes:
        if token in self._added:
            self[token] = self._added[token]
        else:
            piece = self._backend.id_to_token(token) if token >= 0 else None
            self[token] = b"" if piece is None else self._piece(piece)
        return self[token]


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
        if fallback and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
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


def _of_byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in piece])
    except KeyError:  # an added token's own text
        return piece.encode()


@dataclass(frozen=True, slots=True, eq=False)
class DraftText:
    """One prompt in the draft's tokens.

    Attributes:
        tokens: int32 (N,), the draft's.
        target_ends, draft_ends: int64 (M,) and (N,), end of each token in the text, in bytes. Start tokens of the
            draft end at 0.
    """

    tokens: TokenIds
    target_ends: Ends
    draft_ends: Ends


class TextMapping:
    """Converts a target's prompts for a draft with another tokenizer. Not thread-safe.

    Attributes:
        tokenizer: the draft's.
        aligned: share of bytes, in a text of many scripts, in draft tokens that stand for exactly these bytes. Changes
            by the draft's normaliser are ignored.
        ratio: draft tokens per target token, in English and code.
    """

    def __init__(self, target: TokenizerWrapper, draft: TokenizerWrapper) -> None:
        """Prepare the conversion.

        Raises:
            PairMismatchError: a tokenizer is of a kind whose tokens can't be located in the text.
        """
        self.tokenizer = draft
        self._target = TokenBytes(target, _BREAK)
        self._draft = TokenBytes(draft, _UNKNOWN)
        self._backend = backend_of(draft)
        self._start = self._start_tokens()
        plain = self.read(target.encode(_PLAIN, add_special_tokens=False))
        self.ratio = float(plain.draft_ends.size / plain.target_ends.size)
        self.aligned = self._aligned_share(target.encode(_PLAIN + _SCRIPTS, add_special_tokens=False))

    def read(self, tokens: TokenIds) -> DraftText:
        """Return the draft's tokens of the target's text.

        Raises:
            SparseUnsupportedError: the text is empty.
        """
        text, target_ends = self._target.read(tokens)
        decoded = _decode(text)
        if not decoded:
            raise SparseUnsupportedError("the prompt has no text that the draft could read")
        ids, draft_ends = self._tokens(decoded)
        before = np.zeros(len(self._start), dtype=np.int64)
        every = np.asarray([*self._start, *ids], dtype=np.int32)
        return DraftText(every, target_ends, np.concatenate([before, draft_ends]))

    def _start_tokens(self) -> list[int]:
        """Return the tokens that the draft's tokenizer puts before a text."""
        self._backend.encode_special_tokens = True
        alone, whole = (encode_text(self._backend, "a", around=added)[0] for added in (False, True))
        count = next((at for at in range(len(whole)) if whole[at : at + len(alone)] == alone), 0)
        return list(whole[:count])

    def _tokens(self, text: str) -> tuple[list[int], Ends]:
        """Return the draft's tokens, and their ends in the text's bytes.

        Raises:
            SparseUnsupportedError: there are none.
        """
        ids, offsets = self._encode(text)
        data = text.encode()
        own, own_ends = self._draft.read(ids)
        exact = _align_ends(own, own_ends, data)
        if exact is not None:
            return ids, exact
        pieces = _pieces(text, offsets)
        ends = _divide_bytes(np.repeat(pieces.ends, np.diff(pieces.stops, prepend=0)))
        for tokens, stands in pieces:
            before = int(own_ends[tokens.start - 1]) if tokens.start else 0
            exact = _align_ends(own[before : own_ends[tokens.stop - 1]], own_ends[tokens] - before, data[stands])
            if exact is not None:
                ends[tokens] = exact + stands.start
        return ids, ends

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        self._backend.encode_special_tokens = True  # other users of the tokenizer may have set it
        ids, offsets = encode_text(self._backend, text)
        if not ids:
            raise SparseUnsupportedError("the prompt has no text that the draft could read")
        return ids, offsets

    def _aligned_share(self, tokens: TokenIds) -> float:
        text = _decode(self._target.read(tokens)[0])
        (ids, offsets), data = self._encode(text), text.encode()
        good = 0
        for of_piece, stands in _pieces(text, offsets):
            says = b"".join(self._draft[token] for token in ids[of_piece])
            good += (stands.stop - stands.start) * self._same(data[stands], says)
        return good / len(data)

    def _same(self, stands: bytes, says: bytes) -> bool:
        """Return whether the draft's tokens stand for these bytes, apart from changes by its normaliser."""
        if stands == says or self._backend.normalizer is None:
            return stands == says
        normal = self._backend.normalizer.normalize_str(stands.decode(errors="replace"))
        return bool(normal.replace("\u2581", " ").strip(" ") == says.decode(errors="replace").strip(" "))


def map_text(target: TokenizerWrapper, draft: TokenizerWrapper) -> TextMapping:
    """Return the mapping from a target's prompts to a draft with another tokenizer.

    Raises:
        PairMismatchError: some tokens of one of the two can't be located in a text.
    """
    for whose, tokenizer in (("target", target), ("draft", draft)):
        if not TokenBytes(tokenizer, b"").agrees(_PLAIN + _SCRIPTS):
            raise PairMismatchError(f"the bytes of the {whose}'s tokens are not what its tokenizer decodes them to")
    try:
        mapping = TextMapping(target, draft)
    except SparseUnsupportedError as nothing:
        raise PairMismatchError("one of the two tokenizers knows nothing of a text in many scripts") from nothing
    if mapping.aligned <= LEAST_ALIGNED:
        raise PairMismatchError(
            f"of a text in many scripts {mapping.aligned:.2%} of the bytes lie in tokens that say them, more than "
            f"{LEAST_ALIGNED:.1%} are needed; take a draft whose tokenizer has a token for every byte"
        )
    return mapping


def _decode(text: bytes) -> str:
    """Decode to text with the same number of bytes: a question mark replaces each invalid byte."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return _UNDECODABLE.sub("?", text.decode(errors="surrogateescape"))


def _align_ends(own: bytes, ends: Ends, data: bytes) -> Ends | None:
    """Return the ends of tokens that stand for this text, or for spaces followed by it; some tokenizers add a space."""
    added = len(own) - len(data)
    if added < 0 or not own.endswith(data) or own[:added].strip(b" "):
        return None
    return np.maximum(ends - added, 0)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A text cut where token boundaries and character boundaries agree. Tokens that share a character share a piece.

    Attributes:
        stops: int64 (P,), the number of tokens up to each piece's end.
        ends: int64 (P,), end of each piece in the text's bytes.
    """

    stops: Ends
    ends: Ends

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Yield the tokens and the bytes of each piece."""
        stops, ends = [0, *self.stops.tolist()], [0, *self.ends.tolist()]
        return zip(starmap(slice, pairwise(stops)), starmap(slice, pairwise(ends)), strict=True)


def _pieces(text: str, offsets: list[tuple[int, int]]) -> _Pieces:
    """Build pieces from the characters [start, end) of each token.

    Characters between two tokens belong to the earlier one, like a mark that was joined to its letter; white space at
    their end belongs to the later one. Characters after the last token belong to it.
    """
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    bytes_before = np.append(0, np.cumsum(1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)))
    spans = np.array(offsets, dtype=np.int64)
    ends, following = np.maximum.accumulate(spans[:, 1]), np.append(spans[1:, 0], points.size)
    last = np.flatnonzero(np.append(following[:-1] >= ends[:-1], True))
    seen = np.array([not character.isspace() for character in text])
    seen_before = np.append(0, np.maximum.accumulate(np.where(seen, np.arange(1, points.size + 1), 0)))
    borders = np.maximum(ends[last], seen_before[following[last]])
    borders[-1] = points.size
    return _Pieces(last + 1, np.asarray(bytes_before[borders], dtype=np.int64))


def _divide_bytes(ends: Ends) -> Ends:
    """Divide the bytes of several tokens with the same end among them."""
    borders, first, count = np.unique(ends, return_index=True, return_counts=True)
    length, group = np.diff(borders, prepend=0), np.repeat(np.arange(borders.size), count)
    rank = np.arange(ends.size) - first[group] + 1
    return np.asarray(borders[group] - length[group] + length[group] * rank // count[group], dtype=np.int64)


def mapping_between(target: TokenizerWrapper, draft: TokenizerWrapper, draft_id: str) -> TextMapping | None:
    """Return the mapping from the target's tokens to the draft's; None if they are the same.

    Raises:
        PairMismatchError: there is none.
    """
    try:
        if target is not draft:
            check_same_tokenizer(target, draft)
    except PairMismatchError as difference:
        try:
            mapping = map_text(target, draft)
        except PairMismatchError as refused:
            raise PairMismatchError(
                f"{difference}; the draft {draft_id} can't be mapped by text: {refused}"
            ) from refused
        log.info("draft %s: mapped by text, %.4f of the bytes aligned: %s", draft_id, mapping.aligned, difference)
        return mapping
    log.info("draft %s: same tokenizer as the target's", draft_id)
    return None


def check_same_tokenizer(target: TokenizerWrapper, draft: TokenizerWrapper) -> None:
    """Check that the draft's ids mean the target's tokens.

    Raises:
        PairMismatchError: vocabularies, special tokens or the tokens of a probe text differ.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours != theirs:
        differing = sorted(set(ours.items()) ^ set(theirs.items()), key=lambda item: item[1])
        example = ", ".join(f"{token!r}={index}" for token, index in differing[:4])
        raise PairMismatchError(
            f"target and draft have different vocabularies ({len(ours)} and {len(theirs)} tokens; e.g. {example})"
        )
    if _added_ids(target) != _added_ids(draft):
        differing_ids = sorted(_added_ids(target) ^ _added_ids(draft))[:4]
        raise PairMismatchError(f"target and draft have different special tokens (e.g. ids {differing_ids})")
    if target.encode(_PROBE_TEXT) != draft.encode(_PROBE_TEXT):
        raise PairMismatchError("target and draft share a vocabulary but split text differently")


def _added_ids(tokenizer: TokenizerWrapper) -> set[int]:
    """Return the ids of added tokens. Their special flag is ignored: it matters for decoding only, and GGUF files
    differ.
    """
    return {int(index) for index in tokenizer.added_tokens_decoder}
