"""The pre-tokenizers that a GGUF file may name: how each cuts a text before its pieces are merged to tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Splits text before merging.

    Attributes:
        splits: regular expressions, applied in turn; matches and the text between them are pieces.
        whole: a piece that is a token is used unchanged, whatever the merges.
        start: a text begins with the start token by default.
        composed: text is converted to its composed form (NFC) first.
    """

    splits: tuple[str, ...]
    whole: bool = False
    start: bool = False
    composed: bool = False


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    **dict.fromkeys(
        ("llama-bpe", "llama-v3", "llama3"),
        PreTokenizer((GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"],), whole=True, start=True),
    ),
    "qwen2": PreTokenizer((GGUF_PRE_TOKENIZER_SPLITS["qwen2"],), composed=True),
}
