"""Small tokenizers of the kinds that checkpoints have, built here: each reads any text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

__all__ = ["KINDS", "kind", "wrapped"]

_TEXT = (
    "The secret code for Anna is 471128. Nobody knows it, but the code is written in the report of the committee.",
    "def total(values): return sum(value for value in values if value is not None)",
    "Дверь открыта. Ὅλοι οἱ ἄνθρωποι. 中文文本。 日本語の文章です。 naïve déjà vu coöperate 🙂🙂 👩‍💻",
    "  two  spaces\n\n\tand tabs\r\n",
)
STRIP = normalizers.StripAccents()
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def wrapped(backend: Tokenizer, **roles: Any) -> TokenizerWrapper:
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=backend, **roles))


def byte_level(merges: int, normalizer: normalizers.Normalizer | None = None, **more: Any) -> Tokenizer:
    """Byte-level BPE; without merges every byte is a token."""
    backend = Tokenizer(BPE(byte_fallback=False, **more))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_TEXT * 4, trainer)
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<|im_start|>", special=True)])
    return backend


def sentencepiece(prefix: bool) -> Tokenizer:
    """BPE over characters, spaces as U+2581, bytes for what has no token; as llama 2 has it, gemma without prefix."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(_TEXT * 4, trainers.BpeTrainer(vocab_size=260, show_progress=False))
    learned = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    vocab = {name: index for index, name in enumerate([*names, *learned])}
    merges = [tuple(pair) for pair in _merges(trained)]
    backend = Tokenizer(BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    return backend


def _merges(trained: Tokenizer) -> Iterator[Sequence[str]]:
    for merge in json.loads(trained.to_str())["model"]["merges"]:
        yield merge if isinstance(merge, list) else merge.split(" ")


KINDS = {
    "byte-level": lambda: wrapped(byte_level(300), eos_token="<|im_end|>"),
    "single bytes": lambda: wrapped(byte_level(0)),
    "composing": lambda: wrapped(byte_level(200, normalizers.NFC()), eos_token="<|im_end|>"),
    "plain letters": lambda: wrapped(byte_level(200, normalizers.Sequence([normalizers.NFKD(), STRIP]))),
    "lower case": lambda: wrapped(byte_level(200, normalizers.Lowercase())),
    "llama 2": lambda: wrapped(sentencepiece(prefix=True), bos_token="<s>", eos_token="</s>", unk_token="<unk>"),
    "gemma": lambda: wrapped(sentencepiece(prefix=False), bos_token="<s>", eos_token="</s>", unk_token="<unk>"),
}


@cache
def kind(name: str) -> TokenizerWrapper:
    return KINDS[name]()
