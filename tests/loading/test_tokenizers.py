"""Text is split as a model's folder says, whatever transformers thinks of its kind. One tokenizer serves two models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer

from mlx_specprefill import load_pair
from mlx_specprefill.adapters.tokens.tokenizers import Tokenizers
from mlx_specprefill.loading import one_model
from mlx_specprefill.loading.gguf import tokens
from mlx_specprefill.loading.one_model import read_model
from tests.support import gguf_files
from tests.support.tiny import save_checkpoint

MODELS = Path(__file__).parents[2] / "models"
TEXT = "The code for Anna is 123456.\n\n    def total(items):  # of 90210 and 7\n        return sum(items)\n"


@pytest.mark.parametrize("pair", ["demo", "demo-qwen3_5", "demo-gpt_oss", "demo-nemotron_h"])
def test_text_is_split_as_the_folder_says(pair: str) -> None:
    folder = MODELS / pair / "target"
    _, tokenizer, _ = read_model(folder, "auto", lambda *_: None)
    expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    assert list(tokenizer.encode(TEXT, add_special_tokens=False)) == expected


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_draft_with_the_targets_tokens_takes_its_tokenizer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[TokenizerWrapper] = []

    def make(*args: Any, **settings: Any) -> TokenizerWrapper:
        made.append(load_tokenizer(*args, **settings))
        return made[-1]

    for module in (one_model, tokens):
        monkeypatch.setattr(module, "load_tokenizer", make)
    target, draft = tmp_path / "target", tmp_path / "draft"
    if kind == "folder":
        save_checkpoint(target, "llama"), save_checkpoint(draft, "llama")
        _change(draft / "tokenizer_config.json", chat_template="another")
    else:
        contents = gguf_files.tiny("llama")
        target = contents.write(target.with_suffix(".gguf"))
        contents.metadata["tokenizer.chat_template"] = "another"
        draft = contents.write(draft.with_suffix(".gguf"))
    pair = load_pair(target, draft)
    assert made == [pair.tokenizer]
    assert pair.mapping is None


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}),
        ("tokenizer_config.json", {"model_max_length": 100}),
        ("config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ],
)
def test_a_tokenizer_of_other_tokens_is_another_one(file: str, change: dict[str, Any], tmp_path: Path) -> None:
    folders = [save_checkpoint(tmp_path / name, "llama") for name in ("target", "draft")]
    _change(folders[1] / file, **change)
    known: Tokenizers = {}
    first, second = (read_model(folder, "auto", lambda *_: None, None, known)[1] for folder in folders)
    assert first is not second


def _change(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
