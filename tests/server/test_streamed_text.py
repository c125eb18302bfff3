"""The pieces of a streamed answer, joined, are the whole decode: all scripts, all kinds of tokenizers, runs of any
length.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from mlx_specprefill import Event, Finished, GenerationRequest, TokenEvent
from mlx_specprefill_server.explain import explain_chunks
from mlx_specprefill_server.generation.reader import IncrementalDetokenizer, StopMatcher, Vocabulary
from mlx_specprefill_server.local import stream_text

from ..support.tokenizers_of_all_kinds import kind, wrapped
from .fakes import FakePair, inspection, report_of

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXTS = 2000
MOST_DECODED = 60  # tokens per token: the context, and a run's unfinished character
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁the", "▁code", "▁", "the", "e", "o", "s", "▁a", ".", ",", "1"]


def unigram(first_space: bool) -> Any:
    """Pieces with bytes for the rest; a Metaspace decoder, which drops the space before the first piece or none."""
    pieces = ["<unk>", *BYTES, *WORDS]
    backend = Tokenizer(Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0, byte_fallback=True))
    scheme = "first" if first_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    space = decoders.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), space, decoders.Fuse()])
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return wrapped(backend, eos_token="</s>")


def across_characters() -> Any:
    """Byte-level tokens that begin and end inside a character, two thirds of each one of its neighbour's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges = []
    names = dict(
        zip(
            "สวัสดีครับยินดีต้อนรับ".encode(),
            pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str("สวัสดีครับยินดีต้อนรับ")[0][0],
            strict=True,
        )
    )
    for last in sorted(names):
        pair = (names[last], names[0xE0])
        if last != 0xE0 and "".join(pair) not in vocab:
            vocab["".join(pair)] = len(vocab)
            merges.append(pair)
    backend = Tokenizer(BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return wrapped(backend, eos_token="</s>")


MADE: dict[str, Callable[[], Any]] = {
    "unigram, first space": lambda: unigram(True),
    "unigram": lambda: unigram(False),
    "across characters": across_characters,
}
END = dict.fromkeys(MADE, "</s>") | {"llama 2": "</s>", "gemma": "</s>"}
END |= {"byte-level": "<|im_end|>", "single bytes": "<|im_end|>"}
FALLBACK = ["llama 2", "gemma", "unigram, first space", "unigram"]
BYTE_LEVEL = ["byte-level", "single bytes", "across characters"]


@cache
def tokenizer_of(name: str) -> Any:
    return MADE[name]() if name in MADE else kind(name)


@cache
def scripts() -> tuple[str, ...]:
    """Return the assigned characters that NFC keeps, by script: the first word of their names."""
    found: dict[str, list[str]] = {}
    for code in (
        *range(0x20, 0x3400),
        *range(0xA000, 0xAC00),
        *range(0xAC00, 0xD7A4, 97),
        *range(0x4E00, 0x9FFF, 89),
        *range(0xF900, 0xFFF0),
        *range(0x10000, 0x1FFFF),
    ):
        char = chr(code)
        if unicodedata.category(char)[0] not in "C" and unicodedata.normalize("NFC", char) == char:
            found.setdefault(unicodedata.name(char, "OTHER").split()[0], []).append(char)
    return tuple("".join(chars) for chars in found.values())


def random_text(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(1, 4)):
        script = rng.choice(scripts())
        word = "".join(rng.choices(script, k=rng.choice((1, 3, 12, 40))))
        parts.append(rng.choice(("", " ", "the code ", "\n", "e")) + word)
    return "".join(parts)


def stream(name: str, prompt: Sequence[int], ids: Sequence[int]) -> tuple[list[str], int]:
    """Return the pieces, and how many tokens were decoded for them."""
    decode, decoded = Vocabulary(tokenizer_of(name)).decode, 0

    def counted(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return decode(tokens)

    reader = IncrementalDetokenizer(counted, prompt)
    return [reader.push(token) for token in ids] + [reader.finish()], decoded


def encode(name: str, text: str) -> list[int]:
    ids: list[int] = tokenizer_of(name).encode(text, add_special_tokens=False)
    return ids


def run_of(name: str, text: str) -> list[int]:
    """Return the ids of a text without the space that some kinds put before it."""
    ids = encode(name, text)
    return ids if whole(name, encode(name, "e"), ids) == text else ids[1:]


def whole(name: str, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of `ids` behind the prompt, by one decode."""
    decode = Vocabulary(tokenizer_of(name)).decode
    return decode([*prompt, *ids])[len(decode(prompt)) :]


@pytest.mark.extended
@pytest.mark.parametrize("name", FALLBACK + BYTE_LEVEL)
def test_pieces_of_any_script_are_the_whole_decode(name: str) -> None:
    rng = random.Random(name)
    prompt = encode(name, "the code: ")
    for _ in range(TEXTS // len(FALLBACK)):
        ids = encode(name, random_text(rng))
        pieces, decoded = stream(name, prompt, ids)
        expected = whole(name, prompt, ids)
        assert "".join(pieces) == expected
        assert REPLACEMENT in expected or not any(REPLACEMENT in piece for piece in pieces)
        assert decoded <= MOST_DECODED * (len(ids) + 5)


@pytest.mark.parametrize("name", FALLBACK + BYTE_LEVEL)
def test_special_tokens_may_come_anywhere(name: str) -> None:
    rng = random.Random(name)
    end = tokenizer_of(name).convert_tokens_to_ids(END[name])
    for _ in range(50):
        parts = [encode(name, random_text(rng)) for _ in range(3)]
        ids = [*parts[0], end, *parts[1], end, end, *parts[2]]
        assert "".join(stream(name, [end], ids)[0]) == whole(name, [end], ids)


@pytest.mark.parametrize("text", ["🎂🎁🎈🎆🎇🧨✨🎊🎃🎄" * 60, "สวัสดีครับยินดีต้อนรับ" * 30, "안녕하세요 여러분" * 30])
@pytest.mark.parametrize("name", FALLBACK + BYTE_LEVEL)
def test_a_long_run_costs_no_more_per_token_than_a_short_one(name: str, text: str) -> None:
    prompt, ids = encode(name, "e"), encode(name, text)
    pieces, decoded = stream(name, prompt, ids)
    assert "".join(pieces) == whole(name, prompt, ids)
    assert decoded <= MOST_DECODED * len(ids)
    if name not in ("across characters",):
        assert max(map(len, pieces)) <= 12  # nothing is held back


@pytest.mark.parametrize("name", FALLBACK)
def test_an_answer_that_ends_inside_a_character_keeps_those_before(name: str) -> None:
    prompt = encode(name, "e")
    run = run_of(name, "🎂🎁🎈")
    for cut in (1, 2, 3):
        assert "".join(stream(name, prompt, run[:-cut])[0]) == "🎂🎁" + REPLACEMENT * (4 - cut)
        assert "".join(stream(name, prompt, [*run[:-cut], *encode(name, "the")])[0]).endswith("the")


@pytest.mark.parametrize("name", FALLBACK)
def test_wrong_bytes_spoil_no_text_before_or_behind(name: str) -> None:
    rng = random.Random(name)
    prompt = encode(name, "e")
    lead = tokenizer_of(name).convert_tokens_to_ids("<0xF0>")
    for _ in range(100):
        before, behind = (encode(name, "".join(rng.choices("🎂你ю", k=9))) for _ in range(2))
        ids = [*before, *[lead] * rng.choice((4, 5, 30)), *behind]
        pieces, decoded = stream(name, prompt, ids)
        text = "".join(pieces)
        assert text.replace(REPLACEMENT, "") == whole(name, prompt, before) + whole(name, prompt, behind)
        assert text.count(REPLACEMENT) == len(ids) - len(before) - len(behind)
        assert decoded <= MOST_DECODED * len(ids)


@pytest.mark.parametrize("name", FALLBACK + BYTE_LEVEL)
def test_a_stop_string_is_found_inside_a_run(name: str) -> None:
    stop = StopMatcher(("🎈🎆",))
    shown = "".join(map(stop.push, stream(name, encode(name, "e"), run_of(name, "🎂🎁🎈🎆🎇🧨"))[0]))
    assert (shown, stop.matched) == ("🎂🎁", "🎈🎆")


@pytest.mark.parametrize("name", FALLBACK)
def test_the_bytes_of_a_run_make_its_text(name: str) -> None:
    vocabulary = Vocabulary(tokenizer_of(name))
    made = bytes(byte for token in run_of(name, "🎂안녕 ม") for byte in vocabulary.token_bytes(token))
    assert made.decode() == "🎂안녕 ม"
    space = tokenizer_of(name).convert_tokens_to_ids("<0x20>")
    assert vocabulary.token_bytes(space) == [0x20]


@pytest.mark.parametrize("name", FALLBACK)
def test_a_prompt_that_is_cut_inside_a_run_spoils_no_answer(name: str) -> None:
    pieces, _ = stream(name, encode(name, "🎂🎁🎈🎆"), run_of(name, "🎇🧨"))
    assert "".join(pieces) == "🎇🧨"


class Speaker:
    """The part of an engine that one answer needs: it says these tokens."""

    def __init__(self, name: str, ids: Sequence[int]) -> None:
        self.pair = FakePair(tokenizer_of(name))
        self._ids = ids

    def generate(self, request: GenerationRequest) -> Iterator[Event]:
        yield from map(TokenEvent, self._ids)
        yield Finished("length", len(self._ids), report_of(request))


@pytest.mark.parametrize("name", FALLBACK + BYTE_LEVEL)
def test_a_program_gets_the_whole_text_in_pieces_and_at_the_end(name: str) -> None:
    prompt, ids = encode(name, "e"), run_of(name, "🎂🎁🎈🎆สวัสดี")
    pieces: list[str] = []
    engine: Any = Speaker(name, ids)
    text, _ = stream_text(engine, GenerationRequest(prompt, len(ids)), pieces.append)
    assert text == "".join(pieces) == "🎂🎁🎈🎆สวัสดี"


@pytest.mark.parametrize("name", FALLBACK + BYTE_LEVEL)
def test_explained_chunks_have_the_prompts_text(name: str) -> None:
    text = "e" + "🎂🎁🎈🎆สวัสดี" * 9
    request = GenerationRequest(encode(name, text), 1)
    chunks = explain_chunks(tokenizer_of(name), request.prompt, inspection(request))
    assert "".join(chunk.text for chunk in chunks) == whole(name, [], request.prompt.tolist())
