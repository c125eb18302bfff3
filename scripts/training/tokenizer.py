"""The byte-level BPE tokenizer of the demonstration models and their ChatML template."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from mlx_specprefill_evals import haystack

from . import tasks

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# A number keeps its leading space and comes in groups of up to three digits: with a token of its own for the space
# every number would start alike, and the first digits could not be looked up.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


def corpus(seed: int, samples: int) -> Iterator[str]:
    """Return the training text of the tokenizer: numbers, synthetic chats, Python source."""
    for _ in range(400):  # often enough that every number of up to three digits becomes one token
        yield " ".join(f"{n} x{n}" for width in (1, 2, 3) for n in _numbers(width))
    rng = random.Random(f"tokenizer/{seed}")
    mixture = tasks.Mixture(dict.fromkeys(tasks.FACTS, 1.0))
    for _ in range(samples):
        sample = tasks.training_sample(rng, rng.choice((500, 2000)), mixture, count=lambda text: len(text) // 3)
        yield "\n".join(message["role"] + "\n" + message["content"] for message in sample.messages())
    yield "\n".join(haystack.python_lines())


def _numbers(width: int) -> list[str]:
    return [f"{n:0{width}d}" for n in range(10**width)]


def train(vocab_size: int, seed: int, samples: int) -> Tokenizer:
    """Train the tokenizer; the three special tokens get the ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in (PAD, START, END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, samples), trainer)
    return tokenizer


def render(messages: list[tasks.Message]) -> list[tuple[str, bool]]:
    """Return the chat as (text, trained) parts. An answer and its end token are trained; all else is context."""
    parts: list[tuple[str, bool]] = []
    for message in messages:
        opening = f"{START}{message['role']}\n"
        if message["role"] == "assistant":
            parts += [(opening, False), (f"{message['content']}{END}", True), ("\n", False)]
        else:
            parts.append((f"{opening}{message['content']}{END}\n", False))
    return parts
