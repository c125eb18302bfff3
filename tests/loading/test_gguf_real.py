"""The real model's file: SmolLM2, Q4_1 with an embedding in Q8_0."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

from mlx_specprefill import load_pair
from mlx_specprefill.adapters.gguf.header import read_header
from mlx_specprefill.adapters.gguf.weights import PACKED_BITS, packed
from tests.real_model import smollm2_file


def test_packed_arrays_are_those_of_mlx():
    """MLX has a loader of its own for these types, written in C++."""
    file = smollm2_file()
    theirs = mx.load(str(file))
    with file.open("rb") as stream:
        for name, info in read_header(file).tensors.items():
            layer = name.removesuffix(".weight")
            if info.kind in PACKED_BITS:
                arrays = {f"{layer}.{part}": array for part, array in packed(info, stream).items()}
            else:
                arrays = {name: info.read(stream).view(np.float32).reshape(info.shape)}
            for full, array in arrays.items():
                assert np.array_equal(np.array(theirs.pop(full)), array), full
    assert not theirs


def test_it_answers():
    pair = load_pair(smollm2_file())
    assert (pair.model_type, pair.context_length, pair.vocab_size) == ("llama", 8192, 49152)
    assert (pair.tokenizer.bos_token, pair.tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    tokens = [token for token, _ in generate_step(mx.array(prompt), pair.target, max_tokens=10)]
    assert "Paris" in pair.tokenizer.decode(tokens)
