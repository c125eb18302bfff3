"""Where tokens lie in a text, for tokenizers of every kind, against what the tokenizers themselves decode."""

from __future__ import annotations

import random
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordPiece

from mlx_specprefill import LoadError, PairMismatchError
from mlx_specprefill.adapters.gguf import load_gguf
from mlx_specprefill.adapters.text_mapping import TextMapping, TokenBytes, map_text
from mlx_specprefill.errors import SparseUnsupportedError
from mlx_specprefill.specprefill.mapped import Overlap
from tests.support.tiny import tokenizer as words
from tests.support.tokenizers_of_all_kinds import KINDS, byte_level, kind, wrapped

DEMO = Path(__file__).parents[2] / "models/demo/target"
PAIRS = [
    ("byte-level", "llama 2"),
    ("llama 2", "byte-level"),
    ("gemma", "composing"),
    ("composing", "single bytes"),
    ("single bytes", "lower case"),
    ("demo", "gemma"),
]
CHANGING = ("composing", "lower case")
RANGES = [(0x20, 0x7F), (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE80)]
RANGES += [(0x1100, 0x1200), (0x2000, 0x2070), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0x1F300, 0x1FAFF)]
JOINED = [
    "\r\n",
    "\n\n",
    "  ",
    "\t",
    "\0",
    "\u200d",
    "👩‍💻",
    "e\u0301",
    "가",
    "ﬁ",
    "<|im_start|>",
    "</s>",
    "<0x41>",
    "▁",
    " the",
]


def found(name):
    return load_tokenizer(DEMO) if name == "demo" else kind(name)


def random_text(rng, length):
    parts = [
        rng.choice(JOINED) if rng.random() < 0.2 else chr(rng.randrange(*rng.choice(RANGES))) for _ in range(length)
    ]
    return "".join(parts)


def plain(tokenizer, text):
    """Its tokens for text in which nothing names a special token."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    return backend.encode(text, add_special_tokens=False).ids


def said(tokenizer, tokens):
    """The text of tokens as the tokenizer decodes them, and of a start that ends within a character nothing."""
    text = tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False)
    return None if "\ufffd" in text else text.strip(" ")


@pytest.mark.parametrize("texts", [100, pytest.param(5000, marks=pytest.mark.nightly)])
@pytest.mark.extended
def test_six_pairs_of_tokenizers_and_many_texts(texts):
    rng, began = random.Random(0), time.perf_counter()
    mappings = {pair: TextMapping(found(pair[0]), found(pair[1])) for pair in PAIRS}
    for number in range(texts):
        pair = PAIRS[number % len(PAIRS)]
        text = random_text(rng, rng.randrange(1, 60))
        tokens = plain(found(pair[0]), text)
        read = mappings[pair].read(np.array(tokens, dtype=np.int32))
        overlap = Overlap(read.target_ends, read.draft_ends)  # refuses ends that don't ascend, and texts that differ
        data = TokenBytes(found(pair[0]), b"\n").read(tokens)[0]
        assert overlap.draft[-1] == len(data)
        _bytes_are_told_apart(overlap, rng)
        if pair[1] not in CHANGING and number % 50 < 6:
            _ends_as_decoded(found(pair[1]), read, data)
    assert time.perf_counter() - began < 300


def _bytes_are_told_apart(overlap, rng):
    """Every byte has one token on either side: importance of one draft token comes out where it overlaps, and only
    there."""
    at = rng.randrange(overlap.draft.size)
    alone = np.zeros(overlap.draft.size, dtype=np.float32)
    alone[at] = 1
    start = overlap.draft[at - 1] if at else 0
    starts = np.append(0, overlap.target[:-1])
    has_text = overlap.target > starts
    meets = (np.maximum(starts, start) < np.minimum(overlap.target, overlap.draft[at])) & has_text
    assert (overlap.importance(alone)[has_text] > 0).tolist() == meets[has_text].tolist()


def _ends_as_decoded(tokenizer, read, data):
    for at in range(1, read.tokens.size + 1):
        text = said(tokenizer, read.tokens[:at].tolist())
        start = data[: read.draft_ends[at - 1]].decode(errors="replace")
        within = "▁" in data.decode() and "\ufffd" in start  # SentencePiece may make two tokens of it, each a space
        if text is not None and not within:
            start = start.replace("▁", " ")  # the two are one to SentencePiece
            assert text.removeprefix("<s>").replace("▁", " ").strip(" ") == start.strip(" "), (at, start)


@pytest.mark.parametrize("name", KINDS)
def test_the_bytes_of_tokens_are_what_they_decode_to(name):
    rng, tokenizer = random.Random(1), kind(name)
    table = TokenBytes(tokenizer, b"")
    for _ in range(200):
        tokens = plain(tokenizer, random_text(rng, 20))
        text, ends = table.read(tokens)
        assert ends[-1] == len(text)
        assert text.decode().strip(" ") == said(tokenizer, tokens)


def test_a_decomposed_text_is_aligned_by_character():
    """NFC makes one character of two: the token covers both, and all around it stays in place."""
    mapping = TextMapping(kind("byte-level"), kind("composing"))
    text = "Zoe\u0308 the secret"
    assert unicodedata.normalize("NFC", text) != text
    read = mapping.read(np.array(plain(kind("byte-level"), text), dtype=np.int32))
    ends = read.draft_ends.tolist()
    assert ends[-1] == len(text.encode())
    assert len("Zoe\u0308".encode()) in ends
    letters = [token for token, end in zip(read.tokens.tolist(), ends, strict=True) if end > len("Zoe\u0308".encode())]
    assert kind("composing").decode(letters) == " the secret"


def test_lower_case_letters_stand_for_capital_ones():
    read = TextMapping(kind("single bytes"), kind("lower case")).read(np.array(plain(kind("single bytes"), "ANNA is")))
    assert kind("lower case").decode(read.tokens.tolist()) == "anna is"
    assert read.draft_ends[-1] == 7


def test_special_tokens_become_line_breaks_and_text_never_becomes_one():
    target, draft = kind("byte-level"), kind("composing")
    prompt = [*target.encode("<|im_start|>"), *plain(target, "user\nsay <|im_start|>"), *target.encode("<|im_end|>")]
    read = TextMapping(target, draft).read(np.array(prompt, dtype=np.int32))
    assert draft.decode(read.tokens.tolist()) == "\nuser\nsay <|im_start|>\n"
    assert not set(read.tokens.tolist()) & set(draft.encode("<|im_start|>"))


def test_the_drafts_start_token_comes_first_and_has_no_text():
    read = TextMapping(kind("byte-level"), kind("gemma")).read(np.array(plain(kind("byte-level"), "abc")))
    assert read.tokens[0] == kind("gemma").bos_token_id
    assert read.draft_ends[0] == 0
    assert kind("gemma").bos_token_id not in read.tokens[1:]


def test_a_prompt_without_text_is_refused():
    target = kind("single bytes")
    with pytest.raises(SparseUnsupportedError, match="no text"):
        TextMapping(target, kind("byte-level")).read(np.array([10_000]))


@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair_is_accepted(pair):
    mapping = map_text(*map(found, pair))
    assert mapping.aligned > 0.999
    assert 0.2 < mapping.ratio < 5


def test_a_vocabulary_without_bytes_is_refused_with_its_share():
    with pytest.raises(PairMismatchError, match=r"\d+\.\d+% of the bytes"):
        map_text(kind("byte-level"), wrapped(without_bytes(), unk_token="<unk>"))
    with pytest.raises(PairMismatchError, match=r"the bytes|nothing of a text"):
        map_text(kind("byte-level"), words())


def without_bytes() -> Tokenizer:
    """Byte-level merging in which bytes above ASCII have no token."""
    names = sorted(byte_level(0).get_vocab())
    vocab = {name: at for at, name in enumerate(["<unk>", *(n for n in names if n.isascii() or n in "ĠĊĉč")])}
    backend = byte_level(0)
    backend.model = BPE(vocab, [], unk_token="<unk>")
    return backend


def test_unknown_decoders_are_named():
    backend = Tokenizer(WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(PairMismatchError, match="WordPiece"):
        map_text(wrapped(backend), kind("byte-level"))


def test_a_decoder_that_changes_the_text_is_noticed():
    backend = byte_level(0)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")])
    with pytest.raises(PairMismatchError, match=r"decoder|decodes"):
        map_text(wrapped(backend), kind("byte-level"))


@pytest.mark.extended
def test_real_vocabularies(smollm2):
    """SmolLM2's from its GGUF file and the demo pair's, both ways."""
    try:
        _, real, _ = load_gguf(smollm2, dtype=None, pack=True)
    except LoadError:
        pytest.fail("SmolLM2 can't be loaded")
    rng = random.Random(2)
    for target, draft in ((real, found("demo")), (found("demo"), real)):
        mapping = map_text(target, draft)
        assert mapping.aligned == 1
        for _ in range(200):
            tokens = plain(target, random_text(rng, 40))
            read = mapping.read(np.array(tokens, dtype=np.int32))
            _ends_as_decoded(draft, read, TokenBytes(target, b"").read(tokens)[0])


def test_a_long_prompt_is_mapped_in_linear_time():
    """65 536 tokens; a quadratic step would take minutes."""
    target, draft = found("demo"), kind("byte-level")
    mapping = TextMapping(target, draft)
    tokens = np.array(plain(target, "The secret code for Anna — 中文 — is 471128.\n" * 6000)[:65_536], dtype=np.int32)
    began = time.perf_counter()
    assert mapping.read(tokens).target_ends.size == 65_536
    assert time.perf_counter() - began < 20
