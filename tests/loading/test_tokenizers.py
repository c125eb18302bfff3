"""Text is split as a model's folder says, whatever transformers thinks of its kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mlx_specprefill.reading import read_model

MODELS = Path(__file__).parents[2] / "models"
TEXT = "The code for Anna is 123456.\n\n    def total(items):  # of 90210 and 7\n        return sum(items)\n"


@pytest.mark.parametrize("pair", ["demo", "demo-qwen3_5", "demo-gpt_oss", "demo-nemotron_h"])
def test_text_is_split_as_the_folder_says(pair: str) -> None:
    folder = MODELS / pair / "target"
    _, tokenizer, _ = read_model(folder, "auto", lambda *_: None)
    expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    assert list(tokenizer.encode(TEXT, add_special_tokens=False)) == expected
