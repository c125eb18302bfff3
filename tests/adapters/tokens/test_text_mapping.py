"""Where tokens lie in a text, for tokenizers of every kind, against what the tokenizers themselves decode."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer, decoders, processors
from tokenizers.models import BPE, WordPiece

from mlx_specprefill import PairMismatchError
from mlx_specprefill.adapters.tokens.text_mapping import TextMapping, TokenTexts
from mlx_specprefill.errors import SparseUnsupportedError
from mlx_specprefill.loading.gguf import load_gguf
from tests.support.tiny import tokenizer as words
from tests.support.tokenizers_of_all_kinds import KINDS, byte_level, kind, wrapped

DEMO = Path(__file__).parents[3] / "models/demo/target"
PAIRS = [
    ("byte-level", "llama 2"),
    ("llama 2", "byte-level"),
    ("gemma", "composing"),
    ("composing", "single bytes"),
    ("single bytes", "lower case"),
    ("demo", "gemma"),
    ("llama 2", "plain letters"),
    ("plain letters", "demo"),
]
CHANGING = ("composing", "plain letters", "lower case")
RANGES = [(0x20, 0x7F), (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE80)]
RANGES += [(0x1100, 0x1200), (0x2000, 0x2070), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0x1F300, 0x1FAFF)]
JOINED = ["\r\n", "\n\n", "  ", "\t", "\0", "\u200d", "👩‍💻", "e\u0301", "가", "ﬁ"]
JOINED += ["<|im_start|>", "</s>", "<0x41>", "▁", " the"]


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


def mapped(target, draft, text):
    """The text that the target's tokens for it say, and what the draft reads."""
    tokens = np.array(plain(target, text), dtype=np.int32)
    return TokenTexts(target).read(tokens)[0], TextMapping(target, draft).read(tokens)


def lies_as_decoded(tokenizer, tokens, spans, text):
    """The characters up to a token's end are the text of all tokens up to it, unless the next one shares them."""
    spaces = {ord("▁"): " "}  # the two are one to SentencePiece, which may put a space before a text
    assert (np.diff(spans, axis=0) >= 0).all()
    for at in np.flatnonzero(np.append(spans[1:, 0] >= spans[:-1, 1], True)):
        end = spans[at, 1]
        said = tokenizer.backend_tokenizer.decode(tokens[: at + 1], skip_special_tokens=False).removeprefix("<s>")
        assert said.translate(spaces).strip(" ") == text[:end].translate(spaces).strip(" "), (at, said)


@pytest.mark.parametrize("texts", [100, pytest.param(5000, marks=pytest.mark.nightly)])
@pytest.mark.extended
def test_eight_pairs_of_tokenizers_and_many_texts(texts):
    rng = random.Random(0)
    mappings = {pair: TextMapping(*map(found, pair)) for pair in PAIRS}
    for number in range(texts):
        pair = PAIRS[number % len(PAIRS)]
        tokens = plain(found(pair[0]), random_text(rng, rng.randrange(1, 60)))
        text, read = TokenTexts(found(pair[0])).read(tokens)[0], mappings[pair].read(np.array(tokens, dtype=np.int32))
        assert read.draft_spans[-1, 1] == len(text)
        assert set(range(len(text))) == {c for span in read.draft_spans.tolist() for c in range(*span)}
        if pair[1] not in CHANGING:
            lies_as_decoded(found(pair[1]), read.tokens.tolist(), read.draft_spans, text)


@pytest.mark.parametrize("name", KINDS)
def test_the_texts_of_tokens_are_what_they_decode_to(name):
    rng, tokenizer = random.Random(1), kind(name)
    table = TokenTexts(tokenizer)
    for _ in range(100):
        tokens = plain(tokenizer, random_text(rng, 20))
        text, spans = table.read(tokens)
        assert text.strip(" ") == tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False).strip(" ")
        lies_as_decoded(tokenizer, tokens, spans, text)


@pytest.mark.parametrize("name", ["byte-level", "composing", "llama 2", "gemma"])
def test_texts_between_control_tokens_are_read_as_they_are_alone(name):
    rng, tokenizer = random.Random(3), kind(name)
    table = TokenTexts(tokenizer)
    for _ in range(20):
        parts = [plain(tokenizer, random_text(rng, 20)) for _ in range(3)]
        alone = [table.read(part) for part in parts]
        text, spans = table.read([token for part in parts for token in [*part, tokenizer.eos_token_id]])
        assert text == "".join(f"{said}\n" for said, _ in alone)
        end = 0
        for said, places in alone:
            size = len(places) + 1
            assert spans[:size].tolist() == [*(places + end).tolist(), [end + len(said), end + len(said) + 1]]
            spans, end = spans[size:], end + len(said) + 1


@pytest.mark.parametrize(
    ("part", "text", "spans"),
    [
        (slice(None), "é🎂b", [*2 * [[0, 1]], *4 * [[1, 2]], [2, 3]]),
        (slice(2, 5), "\ufffd", 3 * [[0, 1]]),  # an answer that was cut off
        (slice(1, None), "\ufffd🎂b", [*5 * [[0, 2]], [2, 3]]),
    ],
)
def test_tokens_that_share_a_character_each_have_all_of_it(part, text, spans):
    tokenizer = kind("single bytes")
    said, found_spans = TokenTexts(tokenizer).read(plain(tokenizer, "é🎂b")[part])
    assert (said, found_spans.tolist()) == (text, spans)


def test_a_composed_character_is_that_of_both_its_parts():
    """NFC makes one character of two: the token covers both, and all around it stays in place."""
    text, read = mapped(kind("byte-level"), kind("composing"), "Zoe\u0308 the secret")
    lies = [text[start:end] for start, end in read.draft_spans.tolist()]
    assert lies == ["Z", "o", *2 * ["e\u0308"], " the", " secret"]


def test_spaces_that_an_offset_leaves_out_belong_to_the_token_behind_them():
    backend = byte_level(300)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    (_, trimmed), (_, whole) = (
        mapped(kind("gemma"), draft, "a the  code\n  b ") for draft in (wrapped(backend), kind("byte-level"))
    )
    assert trimmed.draft_spans.tolist() == whole.draft_spans.tolist()


def test_special_tokens_become_line_breaks_and_text_never_becomes_one():
    target, draft = kind("byte-level"), kind("composing")
    prompt = [*target.encode("<|im_start|>"), *plain(target, "user\nsay <|im_start|>"), *target.encode("<|im_end|>")]
    read = TextMapping(target, draft).read(np.array(prompt, dtype=np.int32))
    assert draft.decode(read.tokens.tolist()) == "\nuser\nsay <|im_start|>\n"
    assert not set(read.tokens.tolist()) & set(draft.encode("<|im_start|>"))


def test_the_drafts_start_token_comes_first_and_has_no_text():
    _, read = mapped(kind("byte-level"), kind("gemma"), "abc")
    assert read.tokens.tolist().index(kind("gemma").bos_token_id) == 0
    assert read.draft_spans[:2, 0].tolist() == [0, 0]
    assert read.draft_spans[0, 1] == 0


def test_a_prompt_without_text_is_refused():
    target = kind("single bytes")
    with pytest.raises(SparseUnsupportedError, match="no text"):
        TextMapping(target, kind("byte-level")).read(np.array([10_000]))


@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair_is_accepted(pair):
    mapping = TextMapping(*map(found, pair))
    assert mapping.aligned > 0.999
    assert 0.2 < mapping.ratio < 5


def test_a_vocabulary_without_bytes_is_refused_with_its_share():
    for draft in (wrapped(without_bytes(), unk_token="<unk>"), words()):
        with pytest.raises(PairMismatchError, match=r"\d+\.\d+% of the characters"):
            TextMapping(kind("byte-level"), draft)


def without_bytes() -> Tokenizer:
    """Byte-level merging in which bytes above ASCII have no token."""
    names = sorted(byte_level(0).get_vocab())
    vocab = {name: at for at, name in enumerate(["<unk>", *(n for n in names if n.isascii() or n in "ĠĊĉč")])}
    backend = byte_level(0)
    backend.model = BPE(vocab, [], unk_token="<unk>")
    return backend


def test_every_decoder_whose_tokens_add_up_to_its_text_is_read():
    backend = Tokenizer(WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    text, spans = TokenTexts(wrapped(backend)).read([1, 2, 1])
    assert (text, spans.tolist()) == (" ab a", [[0, 2], [2, 3], [3, 5]])


def test_a_decoder_whose_tokens_do_not_is_refused():
    backend = byte_level(0)
    backend.decoder = decoders.CTC()  # drops repetitions
    with pytest.raises(PairMismatchError, match="texts of the target's tokens"):
        TextMapping(wrapped(backend), kind("byte-level"))


@pytest.mark.extended
def test_real_vocabularies(smollm2):
    """SmolLM2's from its GGUF file and the demo pair's, both ways."""
    _, real, _ = load_gguf(smollm2, dtype=None, pack=True)
    rng = random.Random(2)
    for target, draft in ((real, found("demo")), (found("demo"), real)):
        mapping = TextMapping(target, draft)
        assert mapping.aligned == 1
        for _ in range(200):
            tokens = plain(target, random_text(rng, 40))
            read = mapping.read(np.array(tokens, dtype=np.int32))
            lies_as_decoded(draft, read.tokens.tolist(), read.draft_spans, TokenTexts(target).read(tokens)[0])


@pytest.mark.parametrize("text", ["The secret code for Anna — 中文 — is 471128.\n", "\ufffd"])
def test_a_long_prompt_is_mapped_in_linear_time(text):
    """65 536 tokens; a quadratic step would take minutes."""
    target, draft = kind("single bytes"), kind("byte-level")
    mapping = TextMapping(target, draft)
    tokens = np.array(plain(target, text * 22_000)[:65_536], dtype=np.int32)
    began = time.perf_counter()
    assert mapping.read(tokens).target_spans.shape == (65_536, 2)
    assert time.perf_counter() - began < 20
