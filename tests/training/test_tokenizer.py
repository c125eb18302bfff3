"""The tokenizer: exact round trips, numbers as whole tokens, and a template that matches the shipped one."""

import pytest
from jinja2 import Environment
from tokenizers import Tokenizer
from training import tokenizer as chat

TEXTS = [
    "The secret code for Orla is 123456.",
    "  two  spaces\tand\n\nlines\r\n",
    "déjà vu 中文 🙂 x_y=(a+b)[0]; don't",
    '{"id": 7, "name": "Orla"}',
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the secret code for Orla?"},
    {"role": "assistant", "content": "The secret code for Orla is 123456."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return chat.train(vocab_size=3600, seed=0, samples=20)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_training_is_deterministic(tokenizer: Tokenizer) -> None:
    assert chat.train(vocab_size=3600, seed=0, samples=20).to_str() == tokenizer.to_str()


def test_special_tokens_come_first(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in (chat.PAD, chat.START, chat.END)] == [0, 1, 2]


def test_numbers_of_up_to_three_digits_are_one_token(tokenizer: Tokenizer) -> None:
    numbers = [space + f"{n:0{width}d}" for width in (1, 2, 3) for n in range(10**width) for space in ("", " ")]
    assert not [number for number in numbers if len(tokenizer.encode(number).ids) != 1]


def test_a_code_is_two_tokens_of_three_digits(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(" 123456").tokens == ["Ġ123", "456"]


def test_rendering_equals_the_chat_template() -> None:
    template = Environment().from_string(chat.CHAT_TEMPLATE)
    assert "".join(text for text, _ in chat.render(MESSAGES)) == template.render(messages=MESSAGES)


def test_only_answers_and_their_end_are_trained() -> None:
    trained = [text for text, is_trained in chat.render(MESSAGES) if is_trained]
    assert trained == [MESSAGES[2]["content"] + chat.END]
