from __future__ import annotations

from typing import Any

from mlx_specprefill_server.generation.reader import Vocabulary

from .fakes import byte_tokenizer


class SentencePieces:
    """The few answers of a SentencePiece tokenizer that matter here."""

    pieces = ("▁hello", "<0xC3>", "world")

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.pieces[i] for i in ids]

    def decode(self, ids: list[int], **_: Any) -> str:
        return {0: "hello", 1: "�", 2: "world"}[ids[0]]


def test_partial_characters_keep_their_bytes() -> None:
    tokenizer = byte_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    tokens = tokenizer.encode("é🎉 a", add_special_tokens=False)
    assert [vocabulary.token_bytes(token) for token in tokens] == [[byte] for byte in "é🎉 a".encode()]
    assert [vocabulary.token_text(token) for token in tokens] == ["�"] * 6 + [" ", "a"]


def test_special_tokens_are_shown() -> None:
    tokenizer = byte_tokenizer()
    assert Vocabulary(tokenizer).token_text(tokenizer.eos_token_id) == "<|im_end|>"
    assert Vocabulary(tokenizer).stop_ids == {tokenizer.eos_token_id}
    assert Vocabulary(tokenizer).size == len(tokenizer)


def test_sentence_pieces_keep_their_space_and_bytes() -> None:
    vocabulary = Vocabulary(SentencePieces())
    assert [vocabulary.token_text(i) for i in range(3)] == [" hello", "�", "world"]
    assert vocabulary.token_bytes(1) == [0xC3]
