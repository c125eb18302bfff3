"""Tokenizers out of GGUF metadata cut text as `tokenizers` and SentencePiece do with the same vocabulary."""

from __future__ import annotations

import argparse
import inspect
import io
import json
import random
import re
from functools import cache

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from mlx_specprefill import LoadError
from mlx_specprefill.loading.gguf.tokens import build_tokenizer
from tests.support.gguf_files import CONTROL, NORMAL, SPECIAL, TEMPLATE, USER_DEFINED

CORPUS = [
    *inspect.getsource(argparse).splitlines(keepends=True),
    "déjà vu naïve cœur ½ ² 中文字 हिन्दी русский текст ",
] * 2
STRINGS, CONTEXT = 10_000, 4096
PLACES = [
    *(" ", "  ", "\t", "\n", "\r\n", " \n\n ", "\u00a0", "\u2003", "a\u0301", "é", "ﬁ", "½", "Ⅷ", "٣٤", "🙂", "👩‍👩‍👧"),
    *(
        "don't",
        "I'LL",
        "we've",
        " the",
        " 's",
        "中文",
        "हिन्दी",
        "self.add_argument(",
        "12345678",
        "3.14",
        "\u0000",
        "Ġ",
    ),
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


# As the tokenizer.json of GPT-2, SmolLM2, Llama 3 and Qwen 2.5 have it; "default" is llama.cpp's own.
CUTS = {
    "gpt-2": [WORDS],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), WORDS],
    "llama-bpe": [split(LLAMA3), BYTES],
    "qwen2": [split(QWEN2), BYTES],
    "default": [
        split(r"[\p{P}\$\+<=>\^~\|]+"),
        split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
        split(r"\p{N}+"),
        split("[0-9][0-9][0-9]"),
        BYTES,
    ],
}


def strings(count, extra, seed=0):
    """Unicode of all planes, digits, white space, words of the corpus, and these."""
    rng, words = random.Random(seed), "".join(CORPUS).split(" ")
    kinds = [
        lambda: chr(rng.choice([rng.randint(32, 126), rng.randint(0, 0xD7FF), rng.randint(0xE000, 0x10FFFF)])),
        lambda: str(rng.randint(0, 10 ** rng.randint(1, 9))),
        lambda: rng.choice(PLACES),
        lambda: rng.choice(words),
        lambda: " " + rng.choice(words),
        *([lambda: rng.choice(extra)] if extra else []),
    ]
    return ["".join(rng.choice(kinds)() for _ in range(rng.randint(1, 12))) for _ in range(count)]


def byte_level(name):
    """A trained tokenizer in the form of a checkpoint's file, with a token that no merge leads to."""
    made = Tokenizer(BPE(ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(CUTS[name])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    made.train_from_iterator(CORPUS, trainer)
    content = json.loads(made.to_str())
    content["model"]["vocab"]["Ġquizzical"] = made.get_vocab_size()
    made = Tokenizer.from_str(json.dumps(content))
    made.add_tokens([AddedToken("<think>", normalized=False)])
    return made


def metadata_of(made, pre):
    """Return the metadata that llama.cpp's converter writes for a tokenizer."""
    vocab = made.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = {**dict.fromkeys(SPECIAL, CONTROL), "<think>": USER_DEFINED}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def loaded(metadata, architecture="llama"):
    return build_tokenizer(metadata, architecture, len(metadata["tokenizer.ggml.tokens"]), CONTEXT)[0]


def ids(tokenizer, texts):
    """Without the start token that some put before a text."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]


def streamed(tokenizer, tokens):
    """The text as an answer's is made, token by token; mlx-lm drops spaces before it, some kinds one, some all."""
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text.lstrip(" ")


@pytest.mark.parametrize(
    "name", [name if name == "llama-bpe" else pytest.param(name, marks=pytest.mark.extended) for name in CUTS]
)
def test_byte_level_equals_the_tokenizers_file(name):
    file = byte_level(name)
    ours = loaded(metadata_of(file, name))
    texts = strings(STRINGS, [*SPECIAL, "<think>", " quizzical", "quizzical"])
    expected = ids(file, texts)
    assert ids(ours, texts) == expected
    assert sum(map(len, expected)) > 5 * STRINGS
    assert ours.get_vocab() == file.get_vocab()
    for text, tokens in zip(texts[:200], expected, strict=False):
        assert ours.encode(text, add_special_tokens=False) == tokens
        assert ours.decode(tokens) == file.decode(tokens, skip_special_tokens=False)
        if "\0" not in text:  # mlx-lm's detokenizer has another character for it
            assert streamed(ours, tokens) == ours.decode(tokens).lstrip(" ")


@pytest.mark.parametrize(
    ("name", "stated", "starts"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False), ("gpt-2", True, True)],
)
def test_the_start_token(name, stated, starts):
    metadata = metadata_of(byte_level(name), name)
    if stated is not None:
        metadata["tokenizer.ggml.add_bos_token"] = stated
    ours = loaded(metadata)
    assert (ours.encode("word")[0] == ours.bos_token_id == 1) == starts
    assert ours.encode("word", add_special_tokens=False)[0] != 1


def test_template_roles_and_ends():
    ours, ends = build_tokenizer(metadata_of(byte_level("smollm"), "smollm"), "llama", 5000, CONTEXT)
    assert ends == [2, 0]  # the file's own, and <|endoftext|>, a control token of that name
    assert ours.eos_token_ids == {0, 2}
    assert (ours.bos_token, ours.eos_token, ours.model_max_length) == ("<|im_start|>", "<|im_end|>", CONTEXT)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nhi<|im_end|>"


def test_no_pre_tokenizer_is_the_default_with_a_warning(caplog):
    metadata = metadata_of(byte_level("default"), "default")
    expected = ids(loaded(metadata), texts := strings(300, []))
    del metadata["tokenizer.ggml.pre"]
    assert ids(loaded(metadata), texts) == expected
    assert "names no pre-tokenizer" in caplog.text


def trained(**options):
    """A SentencePiece model of type BPE with byte fallback, that changes nothing of a text but its spaces."""
    stored = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("".join(CORPUS).split("\n")),
        model_writer=stored,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    return stored.getvalue()


def processor(stored, prefix):
    """The library's own tokenizer, with or without a space before the text."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(stored)  # type: ignore[attr-defined]
    proto.normalizer_spec.add_dummy_prefix = prefix
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


def pieces_of(stored):
    """Return the metadata of a SentencePiece model as llama.cpp writes it. The types have the same numbers."""
    pieces = sentencepiece_model_pb2.ModelProto.FromString(stored).pieces  # type: ignore[attr-defined]
    names = [piece.piece for piece in pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": [float(piece.score) for piece in pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in pieces],
        "tokenizer.ggml.bos_token_id": next(i for i, name in enumerate(names) if name in ("<s>", "<bos>")),
        "tokenizer.ggml.eos_token_id": next(i for i, name in enumerate(names) if name in ("</s>", "<eos>")),
    }


def plain(texts):
    """Without what SentencePiece reserves: its sign for a space, and NUL."""
    return [text.replace("\u2581", "_").replace("\0", "") for text in texts]


def expected_ids(stored, text, controls, *, prefix):
    """By the library, between the control tokens; only what begins a text gets the space, if it has none."""
    with_space, without = processor_of(stored, True), processor_of(stored, False)
    found, names = [], "|".join(map(re.escape, controls))
    for number, part in enumerate(re.split(f"({names})", text)):
        if part in controls:
            found.append(without.piece_to_id(part))
        elif part:
            first = prefix and number == 0 and not part.startswith(" ")
            found += (with_space if first else without).encode(part)
    return found


processor_of = cache(processor)


@pytest.mark.extended
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_equals_the_library(prefix):
    stored = trained()
    metadata = pieces_of(stored) | {"tokenizer.ggml.add_space_prefix": prefix}
    ours = loaded(metadata)
    texts = plain(strings(STRINGS, ["<s>", "</s>"]))
    expected = [expected_ids(stored, text, ("<s>", "</s>"), prefix=prefix) for text in texts]
    assert ids(ours, texts) == expected
    assert ours.encode("word")[0] == ours.bos_token_id
    for tokens in expected[:200]:
        assert streamed(ours, tokens) == ours.decode(tokens).lstrip(" ")


def test_gemmas_sentencepiece_equals_the_library():
    controls = ("<start_of_turn>", "<end_of_turn>")
    stored = trained(
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        bos_piece="<bos>",
        eos_piece="<eos>",
        add_dummy_prefix=False,
        control_symbols=["<mask>", *controls],
    )
    ours, ends = build_tokenizer(pieces_of(stored), "gemma3", 900, CONTEXT)
    texts = plain(strings(STRINGS, controls))
    assert ids(ours, texts) == [expected_ids(stored, text, controls, prefix=False) for text in texts]
    assert ours.encode("word")[0] == ours.bos_token_id == 2
    assert {ours.convert_ids_to_tokens(end) for end in ends} == {"<eos>", "<end_of_turn>"}


def test_a_vocabulary_without_the_usual_names_is_refused():
    """transformers' class would add them as tokens of its own, behind the embedding's last row."""
    metadata = pieces_of(trained())
    metadata["tokenizer.ggml.tokens"] = ["<what>" if t == "<unk>" else t for t in metadata["tokenizer.ggml.tokens"]]
    with pytest.raises(LoadError, match=r"its vocabulary lacks \['<unk>'\]"):
        loaded(metadata)
