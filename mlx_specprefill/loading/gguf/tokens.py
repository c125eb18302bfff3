"""Builds a tokenizer and a chat template from a GGUF file's metadata.

The result is written to a folder in Hugging Face's form, so that mlx-lm loads it like any other, with its detection of
detokenizer, tool calls and thinking. SentencePiece vocabularies are built by transformers. Byte-level ones are built
here, because transformers' class adds a token to vocabularies without it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from ...errors import LoadError
from .header import shorten
from .pre_tokenizers import PRE_TOKENIZERS

log = logging.getLogger(__name__)

MAX_TOKEN = 1024  # characters
# If merges follow from scores, every split of a token in two is tried, and each may become a merge.
MAX_SCORED_TOKEN, MAX_SCORED = 256, 1 << 22  # characters of one token, of all; 262 144 tokens have 2 million
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
# Tokens that end an answer besides the file's own: llama.cpp's names, control tokens only.
_ENDS = frozenset(
    "<|eot_id|> <|eom_id|> <|end_of_text|> <|im_end|> <|end|> <|endoftext|> <end_of_turn> <eos> </s> <EOT>".split()
)
# Names of control tokens, whatever their type: some converters store them as normal ones.
_CONTROL_NAME = re.compile(r"<\|[^|\s]+\|>|<(?:start|end)_of_turn>")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id with their types; scores and merges if the file has them."""

    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None

    def of_type(self, kind: int) -> list[str]:
        return [token for token, its in zip(self.tokens, self.types, strict=True) if its == kind]


def build_tokenizer(
    metadata: Mapping[str, Any], architecture: str, rows: int, context: int
) -> tuple[TokenizerWrapper, list[int]]:
    """Return the tokenizer of a file, and the ids that end an answer.

    Args:
        architecture: `general.architecture`.
        rows: of the embedding; the vocabulary may be smaller, not larger.
        context: the longest prompt in tokens.

    Raises:
        LoadError: its kind or pre-tokenizer is unknown, or its parts don't fit each other.
    """
    vocabulary = _vocabulary(metadata, rows)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, starts = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        backend, starts = _sentencepiece(metadata, vocabulary, architecture), True
    else:
        raise LoadError(f"tokenizer.ggml.model is {shorten(kind)}; only gpt2 and llama are supported")
    named = _special_tokens(metadata, vocabulary)
    _add_ends(metadata, backend, named, starts)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise LoadError("tokenizer.chat_template is not text")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **named,
        **({} if template is None else {"chat_template": template}),
    }
    ends = _end_ids(metadata, vocabulary)
    with TemporaryDirectory() as folder:
        backend.save(str(Path(folder, "tokenizer.json")), pretty=False)
        Path(folder, "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return load_tokenizer(Path(folder), eos_token_ids=ends or None), ends


def _vocabulary(metadata: Mapping[str, Any], rows: int) -> _Vocabulary:
    """Return the vocabulary, checked: unique tokens of a sane length, no more than the embedding's rows. Padding is
    dropped.
    """
    tokens = _read_list(metadata, "tokens", str)
    if tokens is None or not 0 < len(tokens) <= rows:
        raise LoadError(f"it has {len(tokens or ())} tokens for an embedding of {rows} rows")
    types = _read_list(metadata, "token_type", int) or [_NORMAL] * len(tokens)
    scores = _read_list(metadata, "scores", float)
    if len(types) != len(tokens) or (scores is not None and len(scores) != len(tokens)):
        raise LoadError("its vocabulary has tokens, types and scores of different number")
    count = len(tokens)
    while count and types[count - 1] == _UNUSED and tokens[count - 1] == f"[PAD{count - 1}]":
        count -= 1
    tokens = tokens[:count]
    if len(set(tokens)) < count:
        raise LoadError("its vocabulary has a token twice")
    if longest := next((token for token in tokens if len(token) > MAX_TOKEN), None):
        raise LoadError(f"its token {shorten(longest)} has more than {MAX_TOKEN} characters")
    types = _with_controls(tokens, types[:count], str(metadata.get("tokenizer.chat_template")))
    return _Vocabulary(tokens, types, scores[:count] if scores else None, _read_list(metadata, "merges", str))


def _with_controls(tokens: Sequence[str], types: Sequence[int], template: str) -> list[int]:
    """Return the types with the chat template's control tokens and those that end answers as such, as llama.cpp does.

    A normal token would be read as its letters.
    """
    wrong = [
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_NORMAL, _USER_DEFINED) and _CONTROL_NAME.fullmatch(token) and (token in template or token in _ENDS)
    ]
    if wrong:
        log.warning("%s: no control tokens by their type, read as such", ", ".join(tokens[index] for index in wrong))
    return [_CONTROL if index in set(wrong) else kind for index, kind in enumerate(types)]


def _read_list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any] | None:
    """Return an array of the tokenizer's metadata with values of one type."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        return None
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise LoadError(f"tokenizer.ggml.{name} is no list of {kind.__name__}")
    return values


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and whether texts begin with the start token by default."""
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        log.warning("the file names no pre-tokenizer; 'default' may cut text differently than the model was trained on")
        name = "default"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise LoadError(f"the pre-tokenizer {shorten(name)} is not supported, only {', '.join(PRE_TOKENIZERS)}")
    chosen = PRE_TOKENIZERS[name]
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges = [_pair(merge, vocab) for merge in vocabulary.merges or ()]
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=chosen.whole))
    if chosen.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in chosen.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [AddedToken(token, special=special, normalized=False) for token in vocabulary.of_type(kind)]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    return backend, chosen.start


def _pair(merge: str, vocab: Mapping[str, int]) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or left not in vocab or right not in vocab or left + right not in vocab:
        raise LoadError(f"its merge {shorten(merge)} doesn't join two tokens to a third")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary, architecture: str) -> Tokenizer:
    """Build the tokenizer as transformers does. Merges follow from the scores, as in llama.cpp."""
    if vocabulary.scores is None:
        raise LoadError("its vocabulary has no scores")
    _check_scored(vocabulary)
    parts = {"tokens": vocabulary.tokens, "token_type": vocabulary.types, "scores": vocabulary.scores}
    backend: Tokenizer = convert_gguf_tokenizer(architecture, {"tokenizer_type": "llama", **parts})[0]
    grown = backend.get_vocab().keys() - set(vocabulary.tokens)
    if backend.get_vocab_size() != len(vocabulary.tokens):
        raise LoadError(f"its vocabulary lacks {shorten(sorted(grown))}")
    if metadata.get("tokenizer.ggml.add_space_prefix") is False and isinstance(
        backend.pre_tokenizer, pre_tokenizers.Metaspace
    ):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _check_scored(vocabulary: _Vocabulary) -> None:
    lengths = [len(token) for token in vocabulary.tokens]
    if max(lengths) > MAX_SCORED_TOKEN:
        raise LoadError(f"its vocabulary has a token of {max(lengths)} characters, more than {MAX_SCORED_TOKEN}")
    if sum(lengths) > MAX_SCORED:
        raise LoadError(f"its vocabulary of {sum(lengths)} characters is too large, the limit is {MAX_SCORED}")


def _special_tokens(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, str]:
    """Return the tokens with a role, by transformers' names."""
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: _id(metadata, f"{key}_token_id", vocabulary) for role, key in roles.items()}
    return {role: vocabulary.tokens[index] for role, index in ids.items() if index is not None}


def _id(metadata: Mapping[str, Any], name: str, vocabulary: _Vocabulary) -> int | None:
    index = metadata.get(f"tokenizer.ggml.{name}")
    if index is None:
        return None
    if type(index) is not int or not 0 <= index < len(vocabulary.tokens):
        raise LoadError(f"tokenizer.ggml.{name} is {shorten(index)}, which is none of {len(vocabulary.tokens)} tokens")
    return index


def _add_ends(metadata: Mapping[str, Any], backend: Tokenizer, named: Mapping[str, str], starts: bool) -> None:
    """Add the start token before a text and the end token after it, as the file or its kind of tokenizer requires."""
    start = named.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", starts) else None
    end = named.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    around = [token for token in (start, end) if token is not None]
    if around:
        pieces = [*([start] if start else []), "$A", *([end] if end else [])]
        ids = [(token, backend.token_to_id(token)) for token in around]
        backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ids)


def _end_ids(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> list[int]:
    """Return the ids that end an answer, the file's own first."""
    stated = [_id(metadata, f"{name}_token_id", vocabulary) for name in ("eos", "eot", "eom")]
    known = [
        index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == _CONTROL and token in _ENDS
    ]
    return list(dict.fromkeys([*(index for index in stated if index is not None), *known]))
