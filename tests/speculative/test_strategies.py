"""The tokens that a small model reads if it does not read the whole prompt."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_specprefill.speculative.triforce import read_ends
from tests.support.precision import assert_close
from tests.support.steps import finish
from tests.support.tiny import random_prompt, tiny_model


@pytest.mark.parametrize("length", [3, 10, 16, 300, 700])
def test_the_ends_of_a_prompt_are_read_as_one_text(length: int) -> None:
    """In forwards of 256 tokens at most; a short prompt is read once."""
    model, prompt = tiny_model("llama"), random_prompt(length)
    cache = finish(read_ends(model, prompt, sinks=4, window=280))
    ours = model(mx.array([[9]]), cache=cache)[0, -1]
    left = prompt if length <= 284 else (*prompt[:4], *prompt[-280:])
    assert_close(ours, model(mx.array([[*left, 9]]))[0, -1], atol=1e-4, rtol=1e-4)
