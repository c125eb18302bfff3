"""Settings of config.json: null, missing files, scaled windows; and the token that ends a turn in the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_specprefill import load_pair
from mlx_specprefill.adapters.tokens.turn_ends import TURN_END, end_with_turns
from mlx_specprefill.errors import LoadError
from mlx_specprefill.loading.one_model import context_length
from tests.support.tiny import save_checkpoint

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HEADS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
RETURNS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endfor %}"
)
CHANNELS = "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"


def change(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("missing", [False, True])
def test_a_size_that_is_null_or_missing_is_named_in_one_line(tmp_path: Path, name: str, missing: bool) -> None:
    folder = change(save_checkpoint(tmp_path / "m", "llama"), **{name: None})
    if missing:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != name}))
    with pytest.raises(LoadError, match=f"config.json states no {name}") as error:
        load_pair(folder)
    assert "\n" not in str(error.value)


def test_a_window_that_is_null_is_named_where_it_is_needed(tmp_path: Path) -> None:
    dynamic = {"max_position_embeddings": None, "rope_scaling": {"type": "longrope", "long_factor": 1.0}}
    folder = change(save_checkpoint(tmp_path / "m", "llama"), **dynamic)
    with pytest.raises(LoadError, match=r"config.json states no max_position_embeddings|original_max"):
        load_pair(folder)


@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        (("tokenizer.json",), "no tokenizer here"),
        (("tokenizer.json", "tokenizer_config.json"), "no tokenizer here"),
        (("config.json",), "config.json is missing"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, left_out: tuple[str, ...], says: str) -> None:
    folder = save_checkpoint(tmp_path / "m", "llama")
    for name in left_out:
        (folder / name).unlink()
    with pytest.raises(LoadError, match=says) as error:
        load_pair(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["[]", "3", '"x"', "{}"])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    folder = save_checkpoint(tmp_path / "m", "llama")
    (folder / "config.json").write_text(content)
    with pytest.raises(LoadError, match=r"config\.json"):
        load_pair(folder)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 40960}, 40960),
        ({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 163840),
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
            },
            163840,
        ),
        ({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 40960),
        ({"text_config": {"max_position_embeddings": 100, "rope_scaling": {"type": "yarn", "factor": 2.5}}}, 250),
        ({"max_position_embeddings": None, "rope_scaling": None}, 1 << 20),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "yarn", "factor": None}}, 100),
    ],
)
def test_yarn_multiplies_the_window(config: dict[str, Any], tokens: int) -> None:
    assert context_length(config, None) == tokens


@pytest.mark.parametrize(("limit", "tokens"), [(40960, 131072), (32768, 131072), (65536, 65536), (1 << 40, 131072)])
def test_a_tokenizers_limit_is_the_scaled_window_or_the_unscaled_one(limit: int, tokens: int) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = {"max_position_embeddings": 40960, "rope_scaling": scaling}
    assert context_length(config, tokenizer("", "</s>", model_max_length=limit)) == tokens


def tokenizer(template: str, eos: str, added: tuple[str, ...] = (), **more: Any) -> TokenizerWrapper:
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(eos, special=True)])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, **more)
    fast.chat_template = template or None
    return TokenizerWrapper(fast)


@pytest.mark.parametrize(
    ("template", "eos", "added", "turn_end"),
    [
        (CHATML, "<|endoftext|>", ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        (CHATML + "<|im_start|>assistant\n", "<|endoftext|>", ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        (CHATML, "<|im_end|>", ("<|im_start|>",), None),
        (CHATML, "<|endoftext|>", (), "<|im_end|>"),  # not even a token: it is spelled
        (HEADS, "<|endoftext|>", ("<|user|>", "<|assistant|>"), "<|user|>"),
        (BRACKETS, "</s>", ("[INST]", "[/INST]"), None),
        (BRACKETS, "<|endoftext|>", ("[INST]", "[/INST]", "</s>"), "</s>"),
        (RETURNS, "<|return|>", ("<|end|>", "<|start|>", "<|message|>"), None),
        (CHANNELS, "<|return|>", ("<|end|>", "<|start|>", "<|message|>", "<|channel|>"), None),
        ("{{ raise_exception('no') }}", "</s>", ("<|im_end|>",), None),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "</s>", ("<|im_end|>",), None),
        ("", "</s>", ("<|im_end|>",), None),
    ],
)
def test_what_the_template_writes_behind_an_answer_ends_answers(
    template: str, eos: str, added: tuple[str, ...], turn_end: str | None
) -> None:
    made, config = tokenizer(template, eos, added), dict[Any, Any]()
    end_with_turns(made, config)
    assert config.get(TURN_END) == turn_end
    ends = {eos} | ({turn_end} & set(added))
    assert set(made.convert_ids_to_tokens(sorted(made.eos_token_ids))) == ends
