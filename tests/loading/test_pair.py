"""Loading, and what makes two checkpoints a pair."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_specprefill import LoadError, PairMismatchError, check_same_tokenizer, load_pair
from mlx_specprefill.config import DtypeName
from mlx_specprefill.loading import one_model
from mlx_specprefill.loading.one_model import context_length, stated_sampling
from tests.support.tiny import VOCAB, random_prompt, save_checkpoint, tokenizer
from tests.support.tokenizers_of_all_kinds import kind


def test_a_pair_from_disk(tmp_path):
    target = save_checkpoint(tmp_path / "target", "llama", 1)
    draft = save_checkpoint(tmp_path / "draft", "qwen3", 2)
    pair = load_pair(target, draft)
    assert (pair.model_type, pair.dtype, pair.context_length, pair.vocab_size) == ("llama", "float32", 4096, VOCAB)
    assert pair.sparse_refusal is None
    assert pair.draft is not None
    assert (pair.target_id, pair.draft_id) == ("target", "draft")
    logits = pair.target(mx.array(random_prompt(5))[None])
    assert logits.dtype == mx.float32


class TestGPUsWithoutBfloat16:
    """M1 and M2, by a faked name of the device."""

    @staticmethod
    def stored(folder: Path, scale: float = 1.0) -> Path:
        """A checkpoint in bfloat16, whose embedding is multiplied."""
        where = save_checkpoint(folder / "model", "llama")
        arrays = {name: value.astype(mx.bfloat16) for name, value in mx.load(str(where / "model.safetensors")).items()}
        arrays["model.embed_tokens.weight"] *= scale / mx.abs(arrays["model.embed_tokens.weight"][:29]).max()
        mx.save_safetensors(str(where / "model.safetensors"), arrays, {"format": "mlx"})
        return where

    @pytest.mark.parametrize(
        ("architecture", "dtype", "largest", "expected"),
        [
            ("applegpu_g13s", "auto", 4.0, "float16"),
            ("applegpu_g14d", "auto", 4.0, "float16"),
            ("applegpu_g15s", "auto", 4.0, "bfloat16"),
            ("", "auto", 4.0, "bfloat16"),
            ("applegpu_g13s", "auto", 40_000.0, "bfloat16"),  # float16 ends at 65 504
            ("applegpu_g13s", "bfloat16", 4.0, "bfloat16"),
            ("applegpu_g16s", "float16", 4.0, "float16"),
        ],
    )
    def test_run_float16_where_its_range_is_enough(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        architecture: str,
        dtype: DtypeName,
        largest: float,
        expected: str,
    ) -> None:
        monkeypatch.setattr(one_model, "_on_cpu", lambda: False)
        monkeypatch.setattr(mx, "device_info", lambda: {"architecture": architecture})
        with caplog.at_level("INFO"):
            assert load_pair(self.stored(tmp_path, largest), dtype=dtype).dtype == expected
        emulates = architecture.startswith(("applegpu_g13", "applegpu_g14")) and dtype == "auto"
        assert ("which this GPU emulates" in caplog.text) == emulates


@pytest.mark.parametrize(("dtype", "expected"), [("float16", "float16"), ("bfloat16", "bfloat16")])
def test_dtype_is_what_was_asked_for(tmp_path, dtype, expected):
    where = save_checkpoint(tmp_path / "m", "llama")
    pair = load_pair(where, dtype=dtype)
    assert pair.dtype == expected
    assert pair.target(mx.array([[3, 4]])).dtype == getattr(mx, dtype)


def test_auto_casts_half_precision_to_float32_on_the_cpu_only(tmp_path):
    where = save_checkpoint(tmp_path / "m", "llama")
    arrays = {k: v.astype(mx.float16) for k, v in mx.load(str(where / "model.safetensors")).items()}
    mx.save_safetensors(str(where / "model.safetensors"), arrays, {"format": "mlx"})
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert load_pair(where).dtype == ("float32" if on_cpu else "float16")


def test_without_a_draft(tmp_path):
    pair = load_pair(save_checkpoint(tmp_path / "m", "llama"))
    assert (pair.draft, pair.draft_id, pair.draft_context) == (None, None, None)
    assert pair.sparse_refusal == "no draft model is loaded"


def test_a_different_vocabulary_is_refused(tmp_path):
    target = save_checkpoint(tmp_path / "target", "llama")
    draft = save_checkpoint(tmp_path / "draft", "llama", words=VOCAB - 1)
    with pytest.raises(PairMismatchError, match="different vocabularies"):
        load_pair(target, draft)


def test_another_tokenizer_is_mapped_by_text(tmp_path, caplog):
    """Both say how long their prompts may be; each limit is that of its own model."""
    target = save_checkpoint(tmp_path / "target", "llama", vocab_size=600)
    draft = save_checkpoint(tmp_path / "draft", "qwen3", vocab_size=600, max_position_embeddings=2048)
    for folder, name in ((target, "byte-level"), (draft, "llama 2")):
        kind(name).save_pretrained(folder)
    with caplog.at_level(logging.INFO):
        pair = load_pair(target, draft)
    assert (pair.mapping.aligned, pair.sparse_refusal) == (1, None)
    assert (pair.context_length, pair.draft_context) == (4096, 2048)
    assert pair.draft_tokenizer.bos_token == "<s>"
    assert "draft draft: mapped by text, 1.0000 of the characters aligned: " in caplog.text
    same = load_pair(target, target)
    assert (same.mapping, same.draft_tokenizer) == (None, same.tokenizer)


def test_swapped_tokens_are_refused_although_the_sizes_agree():
    renamed = tokenizer(special=("<eos>", "<unk>"))
    with pytest.raises(PairMismatchError, match="different vocabularies"):
        check_same_tokenizer(tokenizer(), renamed)


def test_different_special_tokens_are_refused():
    plain, marked = tokenizer(), tokenizer()
    marked._tokenizer.add_special_tokens({"additional_special_tokens": ["w5"]})
    with pytest.raises(PairMismatchError, match="special tokens"):
        check_same_tokenizer(plain, marked)


def test_names_do_not_matter(tmp_path):
    first = save_checkpoint(tmp_path / "a", "llama")
    second = save_checkpoint(tmp_path / "b", "qwen3")
    config = json.loads((second / "tokenizer_config.json").read_text())
    (second / "tokenizer_config.json").write_text(json.dumps({**config, "name_or_path": "somebody/else"}))
    assert load_pair(first, second).sparse_refusal is None


@pytest.mark.parametrize("missing", ["nowhere", "config.json", "model.safetensors"])
def test_missing_pieces_are_named(tmp_path, missing):
    where = tmp_path / "m"
    if missing == "nowhere":
        with pytest.raises(LoadError, match="no model here"):
            load_pair(where)
        return
    save_checkpoint(where, "llama")
    (where / missing).unlink()
    with pytest.raises(LoadError, match="m"):
        load_pair(where)


def test_a_broken_checkpoint_is_a_load_error(tmp_path):
    where = save_checkpoint(tmp_path / "m", "llama")
    (where / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(LoadError):
        load_pair(where)


def test_an_unknown_architecture_is_a_load_error(tmp_path):
    where = save_checkpoint(tmp_path / "m", "llama")
    config = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    with pytest.raises(LoadError, match="no_such_model"):
        load_pair(where)


@pytest.mark.parametrize(
    ("stated", "taken"),
    [
        ({"do_sample": True, "temperature": 0.7, "top_k": 20, "eos_token_id": 2}, {"temperature": 0.7, "top_k": 20}),
        ({"do_sample": True, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7}, {}),
        ([], {}),
    ],
)
def test_a_checkpoint_says_how_it_is_sampled(stated, taken, tmp_path):
    where = save_checkpoint(tmp_path / "m", "llama")
    (where / "generation_config.json").write_text(json.dumps(stated))
    assert stated_sampling(where) == taken


def test_a_model_without_a_stated_window_has_one_that_is_a_number_of_tokens():
    assert context_length({}, object()) == 1 << 20
    assert context_length({"max_position_embeddings": 2**31 - 1}, object()) == 1 << 20


def test_a_target_that_cannot_be_prefilled_sparsely_still_loads(tmp_path):
    """gpt2 has learned positions: refused for sparse prefill with the reason, served in full."""
    config = {"model_type": "gpt2", "n_ctx": 64, "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64}
    config |= {"layer_norm_epsilon": 1e-5, "vocab_size": VOCAB}
    where = save_raw(tmp_path / "m", config)
    pair = load_pair(where, save_checkpoint(tmp_path / "draft", "llama"))
    assert pair.sparse_refusal is not None
    assert "position" in pair.sparse_refusal
    assert pair.context_length == 64
    assert pair.target(mx.array([[3, 4, 5]])).shape == (1, 3, VOCAB)


def save_raw(folder, config):
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    folder.mkdir()
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(nn.utils.tree_flatten(model.parameters())), {"format": "mlx"}
    )
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer().save_pretrained(folder)
    return folder
