"""The real model's file: SmolLM2, Q4_1 with an embedding in Q8_0."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from mlx_specprefill import load_pair
from mlx_specprefill.loading.gguf.header import read_header
from mlx_specprefill.loading.gguf.weights import EXACT_BITS, read_arrays
from tests.support.real_model import smollm2_file


@pytest.mark.extended
def test_packed_arrays_are_those_of_mlx():
    """MLX has a loader of its own for these types, written in C++."""
    file = smollm2_file()
    theirs = mx.load(str(file))
    with file.open("rb") as stream:
        for name, info in read_header(file).tensors.items():
            layer = name.removesuffix(".weight")
            for part, array in read_arrays(info, stream, pack=info.kind in EXACT_BITS).items():
                other = theirs.pop(f"{layer}.{part}" if part else name)
                assert mx.array_equal(other, array.astype(other.dtype)), name
    assert not theirs


@pytest.mark.extended
def test_it_answers():
    pair = load_pair(smollm2_file())
    assert (pair.model_type, pair.context_length, pair.vocab_size) == ("llama", 8192, 49152)
    assert (pair.tokenizer.bos_token, pair.tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    tokens = [token for token, _ in generate_step(mx.array(prompt), pair.target, max_tokens=10)]
    assert "Paris" in pair.tokenizer.decode(tokens)
