"""Models under their repository ids, in folders laid out as huggingface_hub does; no network is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from gguf import GGMLQuantizationType
from huggingface_hub import constants, snapshot_download

from mlx_specprefill import (
    LoadError,
    describe_stored,
    find_model,
    load_pair,
    loaded_bytes,
    resolve_model_path,
)
from mlx_specprefill.errors import Refused
from mlx_specprefill.loading.gguf import describe_gguf, load_gguf
from tests.support.gguf_files import CONFIGS, contents, random_weights, tiny
from tests.support.tiny import save_checkpoint

COMMIT = "c" * 40


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, whose Hugging Face cache is `hub`; every attempt to reach a network fails."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def cached(home: Path, name: str) -> Path:
    """The folder of a repository's one commit in the cache."""
    stored = home / "hub" / f"models--{name.replace('/', '--')}"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text(COMMIT)
    return stored / "snapshots" / COMMIT


def test_a_model_of_the_cache_is_loaded_under_its_id(home: Path) -> None:
    save_checkpoint(cached(home, "org/target"), "llama")
    save_checkpoint(cached(home, "org/draft"), "qwen3")
    pair = load_pair("org/target", "org/draft")
    assert (pair.target_id, pair.draft_id, pair.sparse_refusal) == ("org/target", "org/draft", None)
    assert pair.own_parts["mtp"] == Refused("MTP heads of llama are not supported")


def test_the_cache_is_laid_out_as_huggingface_hub_reads_it(home: Path) -> None:
    folder = save_checkpoint(cached(home, "org/name"), "llama")
    assert find_model("org/name") == folder == Path(snapshot_download("org/name", local_files_only=True))


def test_a_folder_of_that_path_goes_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(cached(home, "org/name"), "llama")
    monkeypatch.chdir(home)
    assert resolve_model_path("org/name") != Path("org/name")
    save_checkpoint(home / "org" / "name", "llama")
    assert resolve_model_path("org/name") == Path("org/name")
    assert resolve_model_path("./nowhere") == Path("./nowhere")


class TestWhatIsNotWhole:
    def test_a_cache_that_lacks_weights(self, home: Path) -> None:
        folder = save_checkpoint(cached(home, "org/name"), "llama")
        (folder / "model.safetensors").unlink()
        assert find_model("org/name") is None

    def test_a_cache_that_lacks_one_of_several_files(self, home: Path) -> None:
        folder = save_checkpoint(cached(home, "org/name"), "llama")
        shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        shutil.copy(folder / "model.safetensors", folder / shards["a"])
        assert find_model("org/name") is None
        shutil.copy(folder / "model.safetensors", folder / shards["b"])
        assert find_model("org/name") == folder

    def test_a_commit_without_a_folder(self, home: Path) -> None:
        cached(home, "org/name")
        assert find_model("org/name") is None

    @pytest.mark.parametrize("place", [".lmstudio/models", ".cache/lm-studio/models"])
    def test_what_lm_studio_left_is_found_and_each_by_its_name_alone(self, home: Path, place: str) -> None:
        ours, hub = (
            save_checkpoint(where, "llama") for where in (home / place / "pub" / "lisher", cached(home, "org/name"))
        )
        assert [find_model(name) for name in ("pub/lisher", "lisher", "name")] == [ours, ours, hub]
        save_checkpoint(home / place / "pub" / "name", "llama")
        assert find_model("org/name") == hub
        with pytest.raises(LoadError, match="several models are called name: org/name, pub/name"):
            find_model("name")

    @pytest.mark.parametrize("name", ["name", "a/b/c", "../name", "org/..", "org/name/", "/org/name", "org/na me"])
    def test_what_is_no_id(self, name: str) -> None:
        assert find_model(name) is None


class TestGguf:
    def test_the_only_file_is_meant(self, home: Path) -> None:
        folder = cached(home, "org/name")
        folder.mkdir(parents=True)
        (folder / "mmproj-name.gguf").touch()
        file = tiny("llama").write(folder / "name-Q8_0.gguf")
        assert find_model("org/name") == file
        assert load_pair("org/name", "self").target_id == "org/name"

    def test_one_of_several_has_to_be_named(self, home: Path) -> None:
        folder = cached(home, "org/name")
        folder.mkdir(parents=True)
        for name in ("a.gguf", "b.gguf"):
            tiny("llama").write(folder / name)
        with pytest.raises(LoadError, match=r"several GGUF files: name one of them .*: a\.gguf, b\.gguf"):
            load_pair("org/name")
        assert load_pair("org/name/b.gguf", "self").target_id == "b"


class TestWhatFilesSay:
    """Sizes before loading are those of the loaded model."""

    def held(self, path: Path) -> int:
        pair = load_pair(path)
        return sum(array.nbytes for _, array in nn.utils.tree_flatten(pair.target.parameters()))

    @pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
    def test_of_a_folder(self, home: Path, dtype: mx.Dtype) -> None:
        folder = save_checkpoint(home / "name", "llama")
        arrays = {key: array.astype(dtype) for key, array in mx.load(str(folder / "model.safetensors")).items()}
        mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
        config, parameters = describe_stored(folder)
        assert config["model_type"] == "llama"
        assert loaded_bytes(parameters) == self.held(folder)

    @pytest.mark.parametrize("pack", [False, True])
    def test_of_a_gguf_file(self, home: Path, pack: bool) -> None:
        weights = random_weights(CONFIGS["llama"])
        packed = contents("llama", CONFIGS["llama"], weights, lambda name: GGMLQuantizationType.Q8_0)
        path = packed.write(home / "a.gguf")
        _, parameters = describe_gguf(path, pack=pack)
        model, _, config = load_gguf(path, dtype=mx.float16, pack=pack)
        held = sum(array.nbytes for _, array in nn.utils.tree_flatten(model.parameters()))
        assert loaded_bytes(parameters, "stored") == held
        assert describe_stored(path)[0].items() <= config.items()

    @pytest.mark.parametrize("content", ["", "[]", "{"])
    def test_of_a_broken_configuration(self, home: Path, content: str) -> None:
        folder = save_checkpoint(home / "name", "llama")
        (folder / "config.json").write_text(content)
        with pytest.raises(LoadError, match=str(folder)):
            describe_stored(folder)

    def test_of_cut_off_weights(self, home: Path) -> None:
        folder = save_checkpoint(home / "name", "llama")
        (folder / "model.safetensors").write_bytes(b"\0" * 4)
        with pytest.raises(LoadError, match=str(folder)):
            describe_stored(folder)
