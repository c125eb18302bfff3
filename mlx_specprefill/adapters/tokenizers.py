"""Compares two tokenizers, and maps between them if they differ."""

from __future__ import annotations

import logging

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import PairMismatchError
from .text_mapping import TextMapping, map_text

__all__ = ["check_same_tokenizer", "mapping_between"]

# Text on which two tokenizers with one vocabulary can still differ: normalisers, pre-tokenizers, merges.
_PROBE_TEXT = "Hello  World\n\tdéjà vu 12345.67 don't 中文 🙂 x_y=(a+b)[0]; ﬁ <|im_start|>"

log = logging.getLogger(__name__)


def mapping_between(target: TokenizerWrapper, draft: TokenizerWrapper, draft_id: str) -> TextMapping | None:
    """Return the mapping from the target's tokens to the draft's; None if they are the same.

    Raises:
        PairMismatchError: there is none.
    """
    try:
        check_same_tokenizer(target, draft)
    except PairMismatchError as difference:
        return _mapped(target, draft, draft_id, difference)
    log.info("draft %s: same tokenizer as the target's", draft_id)
    return None


def _mapped(
    target: TokenizerWrapper, draft: TokenizerWrapper, draft_id: str, difference: PairMismatchError
) -> TextMapping:
    try:
        mapping = map_text(target, draft)
    except PairMismatchError as refused:
        raise PairMismatchError(f"{difference}; the draft {draft_id} can't be mapped by text: {refused}") from refused
    log.info("draft %s: mapped by text, %.4f of the bytes aligned: %s", draft_id, mapping.aligned, difference)
    return mapping


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
    if _added(target) != _added(draft):
        differing_ids = sorted(_added(target) ^ _added(draft))[:4]
        raise PairMismatchError(f"target and draft have different special tokens (e.g. ids {differing_ids})")
    if target.encode(_PROBE_TEXT) != draft.encode(_PROBE_TEXT):
        raise PairMismatchError("target and draft share a vocabulary but split text differently")


def _added(tokenizer: TokenizerWrapper) -> set[int]:
    """Return the ids of added tokens. Their special flag is ignored: it matters for decoding only, and GGUF files
    differ.
    """
    return {int(index) for index in tokenizer.added_tokens_decoder}
