"""Prompts that ask for one fact in a long text, as token ids."""

from __future__ import annotations

from mlx_lm.tokenizer_utils import TokenizerWrapper
from training import tasks

__all__ = ["needle_prompt"]


def needle_prompt(
    tokenizer: TokenizerWrapper, seed: int, length: int, depth: float, begun: bool = False
) -> tuple[int, ...]:
    """At most `length` tokens, the fact at `depth` (0 to 1) of the text; names and words that no training used.

    Args:
        begun: the answer is begun, up to the value: what follows can only be known from the text (RULER's prefix).
    """

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    sample = tasks.needle_sample(seed, length, depth, count)
    prompt = tokenizer.apply_chat_template(sample.messages()[:-1], add_generation_prompt=True)
    answer = sample.turns[0].answer
    beginning = answer[: answer.index(tasks.expected_value(answer))].rstrip() if begun else ""
    return tuple(prompt) + tuple(tokenizer.encode(beginning, add_special_tokens=False))
