"""Compares two tokenizers, and finds a target's tokens in the text of a draft with another one, by characters.

The target's special tokens become line breaks in that text, so that two messages don't run together. The draft's chat
template is not applied; the start token of its tokenizer is. No text of the prompt becomes a special token of the
draft.

A token's text is what the tokenizer decodes it to. Tokens that share a character each have the whole character.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer

from ...arrays import Bools, Floats, Spans
from ...errors import PairMismatchError, SparseUnsupportedError
from ...request import TokenIds
from .backend import encode_text

LEAST_ALIGNED = 0.999  # share of characters
_BREAK = "\n"  # text of the target's special tokens
_PART = "\ufffd"  # text of a token with a part of a character
_KNOWN = 1 << 16  # texts of tokens that share characters
_LONGEST = 12  # tokens decoded together; whole characters, if each of their 3 or 4 bytes is a token
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


class TokenTexts(dict[int, str]):
    """The texts of a tokenizer's tokens. Decodes each id once. Not thread-safe."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        """Raises:
        PairMismatchError: its tokens one by one are not the text that it decodes them to together.
        """
        self._backend = backend_of(tokenizer)
        added = self._backend.get_added_tokens_decoder().items()
        super().__init__({index: _BREAK for index, token in added if token.special})
        self._together = lru_cache(_KNOWN)(self._decode)
        self._before = encode_text(self._backend, "a")[0][-1:]  # decoders may strip the space of the first token
        self._skipped = len(self._backend.decode(self._before, skip_special_tokens=False))
        ids = [token for token in encode_text(self._backend, _PLAIN + _SCRIPTS)[0] if token not in self]
        if self.read(ids)[0].strip(" ") != self._backend.decode(ids, skip_special_tokens=False).strip(" "):
            raise PairMismatchError("the texts of the target's tokens are not what its tokenizer decodes them to")

    def read(self, ids: Sequence[int] | TokenIds) -> tuple[str, Spans]:
        """Return the text of these tokens, and the characters of each in it.

        A token without text has the characters of the one behind it.
        """
        tokens = np.asarray(ids, dtype=np.int32).tolist()
        texts = [self[token] for token in tokens]
        pending, together = 0, self._together  # pending: tokens in front of this one that end within a character
        for at, later in pairwise([*(at for at, text in enumerate(texts) if _PART in text), len(texts) + 1]):
            text = together(*tokens[at - pending : at + 1])
            if text[-1:] == _PART and later == at + 1 and pending < _LONGEST - 1:
                texts[at] = ""
                pending += 1
            else:
                texts[at] = text
                pending = 0
        whole, lengths = "".join(texts), np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        ends = np.cumsum(lengths)
        shared = np.minimum.accumulate(np.where(lengths > 0, ends, len(whole))[::-1])[::-1]
        return whole, np.stack([ends - lengths, shared], axis=1)

    def _decode(self, *tokens: int) -> str:
        text: str = self._backend.decode([*self._before, *tokens], skip_special_tokens=False)
        return text[self._skipped :]

    def __missing__(self, token: int) -> str:
        self[token] = self._decode(token)
        return self[token]


@dataclass(frozen=True, slots=True, eq=False)
class DraftText:
    """One prompt in the draft's tokens. Two tokens overlap if they share a character.

    Attributes:
        tokens: int32 (N,), the draft's.
        target_spans, draft_spans: (M, 2) and (N, 2), the characters of each token. Several may share one, and some have
            none, as the draft's start tokens.
    """

    tokens: TokenIds
    target_spans: Spans
    draft_spans: Spans

    def importance(self, found: Floats) -> Floats:
        """Return the importance of the target's tokens, (M,), from the draft's, (N,): the maximum over overlapping
        tokens.

        No value is negative. A token without text has none.
        """
        meets = _overlaps(self.target_spans, self.draft_spans)
        counted = np.append(np.where(_filled(self.draft_spans), found, np.float32(0)), np.float32(0))
        return np.where(_filled(meets), np.maximum.reduceat(counted, meets.ravel())[::2], np.float32(0))

    def mask(self, chosen: Bools) -> Bools:
        """Return a mask of the draft's tokens, (N,), from the target's, (M,): true if all overlapping tokens are
        chosen.

        Also true for tokens without text.
        """
        meets = _overlaps(self.draft_spans, self.target_spans)
        counted = np.append(chosen | ~_filled(self.target_spans), True)
        return np.where(_filled(meets), np.logical_and.reduceat(counted, meets.ravel())[::2], True)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Return the draft's tokens [start, end) that overlap the target's [start, end), as in `spans`."""
        ((first, stop),) = self.spans(np.array([[start, end]])).tolist()
        return first, stop

    def spans(self, ranges: Spans) -> Spans:
        """Return the draft's tokens [start, end) that overlap each of the target's, at least one, (N, 2) -> (N, 2).

        For target tokens without text it is the last draft token that begins before them.
        """
        stop = np.maximum(
            np.searchsorted(self.draft_spans[:, 0], self.target_spans[ranges[:, 1] - 1, 1], side="left"), 1
        )
        first = np.searchsorted(self.draft_spans[:, 1], self.target_spans[ranges[:, 0], 0], side="right")
        return np.stack([np.minimum(first, stop - 1), stop], axis=1)


def _filled(ranges: Spans) -> Bools:
    return ranges[:, 0] < ranges[:, 1]


def _overlaps(spans: Spans, others: Spans) -> Spans:
    """Return for every token the others [first, stop) that it overlaps; empty for a token without text.

    Raveled it suits `reduceat`, of whose results every second one counts.
    """
    first = np.searchsorted(others[:, 1], spans[:, 0], side="right")
    stop = np.searchsorted(others[:, 0], spans[:, 1], side="left")
    return np.stack([first, np.where(_filled(spans), np.maximum(first, stop), first)], axis=1)


class TextMapping:
    """Converts a target's prompts for a draft with another tokenizer. Not thread-safe.

    Attributes:
        tokenizer: the draft's.
        aligned: share of characters, in a text of many scripts, in draft tokens that stand for them. Changes by the
            draft's normaliser are ignored.
        ratio: draft tokens per target token, in English and code.
    """

    def __init__(self, target: TokenizerWrapper, draft: TokenizerWrapper) -> None:
        """Prepare the conversion.

        Raises:
            PairMismatchError: a tokenizer is of a kind whose tokens can't be located in the text, or the draft's does
                not know all of a text in many scripts.
        """
        self.tokenizer = draft
        self._target = TokenTexts(target)
        self._backend = backend_of(draft)
        self.aligned = self._aligned_share(_PLAIN + _SCRIPTS)
        if self.aligned <= LEAST_ALIGNED:
            raise PairMismatchError(
                f"of a text in many scripts {self.aligned:.2%} of the characters are in tokens of their own text, "
                f"more than {LEAST_ALIGNED:.1%} are needed; take a draft whose tokenizer has a token for every byte"
            )
        self._start = self._start_tokens()
        plain = self.read(target.encode(_PLAIN, add_special_tokens=False))
        self.ratio = len(plain.draft_spans) / len(plain.target_spans)

    def read(self, tokens: TokenIds) -> DraftText:
        """Return the draft's tokens of the target's text.

        Raises:
            SparseUnsupportedError: the text is empty.
        """
        text, target_spans = self._target.read(tokens)
        ids, spans = self._encode(text)
        if not ids:
            raise SparseUnsupportedError("the prompt has no text that the draft could read")
        every = np.asarray([*self._start, *ids], dtype=np.int32)
        before = np.zeros((len(self._start), 2), dtype=np.int64)
        return DraftText(every, target_spans, np.concatenate([before, _without_gaps(text, spans)]))

    def _encode(self, text: str) -> tuple[list[int], Spans]:
        self._backend.encode_special_tokens = True  # other users of the tokenizer may have set it
        ids, offsets = encode_text(self._backend, text)
        flat = np.fromiter(chain.from_iterable(offsets), dtype=np.int64, count=2 * len(offsets))
        return ids, flat.reshape(-1, 2)

    def _start_tokens(self) -> list[int]:
        """Return the tokens that the draft's tokenizer puts before a text."""
        alone, whole = (encode_text(self._backend, "a", around=added)[0] for added in (False, True))
        count = next((at for at in range(len(whole)) if whole[at : at + len(alone)] == alone), 0)
        return list(whole[:count])

    def _aligned_share(self, text: str) -> float:
        """Return the share of characters in tokens that stand for them. Spaces may be left out of a token's span."""
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        names = [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]
        names.append(getattr(self._backend.model, "unk_token", None) or "")
        unknown = {self._backend.token_to_id(name) for name in names}
        good = np.array([character == " " for character in text])
        for token, (start, end) in zip(*self._encode(text), strict=True):
            good[start:end] |= token not in unknown
        return float(good.mean())


def _without_gaps(text: str, spans: Spans) -> Spans:
    """Give all characters of the text to tokens.

    Characters between two tokens belong to the earlier one, like a mark that was joined to its letter; white space at
    their end belongs to the later one. Characters before the first token and after the last one belong to these.
    """
    spans = np.maximum.accumulate(spans, axis=0)
    starts, ends = np.append(0, spans[1:, 0]), np.append(spans[:-1, 1], len(text))
    last = np.searchsorted(ends, ends, side="right") - 1  # of the tokens that share a character
    for at in np.flatnonzero(starts[1:] > ends[:-1]).tolist():
        between = text[ends[at] : starts[at + 1]]
        ends[at] += len(between.rstrip())
        starts[at + 1] = ends[at]
    return np.stack([starts, ends[last]], axis=1)


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
            mapping = TextMapping(target, draft)
        except PairMismatchError as refused:
            raise PairMismatchError(
                f"{difference}; the draft {draft_id} can't be mapped by text: {refused}"
            ) from refused
        log.info("draft %s: mapped by text, %.4f of the characters aligned: %s", draft_id, mapping.aligned, difference)
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
