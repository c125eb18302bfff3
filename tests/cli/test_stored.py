"""`mlx-specprefill list`, `show`, `rm` and `recommend`, on models that are made here; a hub is a stand-in."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import Result
from huggingface_hub import constants, scan_cache_dir
from typer.testing import CliRunner

from mlx_specprefill import SHAPES, find_model, load_pair, shape_work
from mlx_specprefill.engine.admission.footprint import measure_footprint, weight_bytes
from mlx_specprefill_server import cli
from mlx_specprefill_server.cli import stored
from mlx_specprefill_server.getting.downloading import fetch
from mlx_specprefill_server.getting.hub import look_up
from mlx_specprefill_server.getting.recommending import TABLE, recommended
from tests.gguf_files import tiny
from tests.hub import Hub, hub_of, used_by_this_process
from tests.tiny import CONFIGS, save_checkpoint

PAIRS = """
[a.target]
package = "no-such-package==1.2"
file = "no_such_package/weights.gguf"
sha256 = "%s"
[b]
target = "org/target"
draft = "org/draft"
[c]
target = "org/elsewhere"
""" % ("0" * 64)
LONG = {"max_position_embeddings": 200_000, "num_hidden_layers": 12}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With a large and a small model, which are in the cache, too."""
    with hub_of() as hub:
        used_by_this_process(hub, home / "huggingface", monkeypatch)
        hub.add("org/target", save_checkpoint(home / "target", "llama", 1, **LONG))
        hub.add("org/draft", save_checkpoint(home / "draft", "llama", 2, max_position_embeddings=70_000))
        for name in hub.repositories:
            fetch(look_up(name))
        yield hub


@pytest.fixture
def lm_studio(home: Path) -> Path:
    folder = home / ".lmstudio" / "models" / "org"
    save_checkpoint(folder / "theirs", "qwen3", 3, words=90, vocab_size=90, max_position_embeddings=70_000)
    (folder / "packed").mkdir()
    for name in ("a", "b"):
        tiny("llama", max_position_embeddings=70_000).write(folder / "packed" / f"{name}.gguf")
    return folder


def run(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner(env={"COLUMNS": "250"}).invoke(cli.app, list(arguments), input=answer)


def said(*arguments: str) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refused(*arguments: str) -> str:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    return done.stderr


class TestList:
    def test_it_has_every_model_with_its_place_and_what_is_exact(self, hub: Hub, lm_studio: Path, home: Path) -> None:
        found = {model["id"]: model for model in said("list")["models"]}
        places = {name: (model["place"], model["architecture"], model["support"]) for name, model in found.items()}
        assert places == {
            "org/draft": ("hugging-face", "llama", "exact"),
            "org/target": ("hugging-face", "llama", "exact"),
            "org/packed/a.gguf": ("lm-studio", "llama", "exact"),
            "org/packed/b.gguf": ("lm-studio", "llama", "exact"),
            "org/theirs": ("lm-studio", "qwen3", "exact"),
        }
        content = sum(map(len, hub.repositories["org/target"].values()))
        assert content <= found["org/target"]["bytes"] <= content + 4096  # and the hub's own notes
        assert Path(found["org/target"]["path"]) == find_model("org/target")

    def test_what_can_not_be_loaded_says_why(self, hub: Hub, lm_studio: Path) -> None:
        config = {**CONFIGS["llama"], "model_type": "unheard_of"}
        (lm_studio / "theirs" / "config.json").write_text(json.dumps(config))
        (find_model("org/target") or Path()).joinpath("model.safetensors").unlink()
        found = {model["id"]: (model["support"], model["reason"]) for model in said("list")["models"]}
        assert found["org/theirs"] == ("not loadable", "mlx-lm has no architecture 'unheard_of'")
        assert found["org/target"] == ("not loadable", "it isn't whole, or holds no model that can be loaded")

    def test_packages_and_pairs(self, hub: Hub, home: Path) -> None:
        (home / "pairs.toml").write_text(PAIRS)
        found = said("list", "--pairs-file", str(home / "pairs.toml"))
        assert found["packages"] == [{"package": "no-such-package==1.2", "pair": "a", "path": None}]
        states = {pair["pair"]: pair["state"] for pair in found["pairs"]}
        assert states == {"a": "not installed", "b": "ready", "c": "from its repository"}

    def test_pairs_of_the_users_table_come_after_the_named_ones(self, hub: Hub, home: Path) -> None:
        named = said("list")
        table = home / ".config" / "mlx-specprefill" / "models.toml"
        table.parent.mkdir(parents=True)
        table.write_text(PAIRS)
        both = said("list")
        assert both["pairs"][: len(named["pairs"])] == named["pairs"]
        states = {pair["pair"]: pair["state"] for pair in both["pairs"][len(named["pairs"]) :]}
        assert states == {"a": "not installed", "b": "ready", "c": "from its repository"}
        assert both["packages"] == [
            *named["packages"],
            {"package": "no-such-package==1.2", "pair": "a", "path": None},
        ]

    def test_the_tables_say_the_same(self, hub: Hub, lm_studio: Path) -> None:
        shown = run("list").stdout
        for words in (
            "org/target",
            "Hugging Face's cache",
            "org/theirs",
            "LM Studio's folder",
            "demo-qwen3_5",
            "exact",
        ):
            assert words in shown

    def test_nothing_is_there(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with hub_of() as empty:
            used_by_this_process(empty, home / "huggingface", monkeypatch)
            assert said("list")["models"] == []
            assert run("list").exit_code == 0


class TestShow:
    def test_memory_is_what_the_loaded_model_takes(self, hub: Hub) -> None:
        found = said("show", "org/target")
        model = load_pair("org/target").target
        footprint = measure_footprint(model, 128)
        sizes = {str(n): weight_bytes(model) + footprint.of_held(n) for n in (8192, 65536, 131072)}
        assert found["memory"] == sizes
        assert (found["weights"], found["context"], found["support"]) == (weight_bytes(model), 200_000, "exact")

    def test_each_draft_at_hand_has_its_gain(self, hub: Hub, lm_studio: Path) -> None:
        found = {draft["id"]: draft for draft in said("show", "org/target")["drafts"]}
        assert found.keys() == {"self", "org/draft", "org/theirs", "org/packed/a.gguf", "org/packed/b.gguf"}
        kinds = [found[name]["tokenizer"] for name in ("org/draft", "org/theirs", "org/packed/a.gguf")]
        assert kinds == ["same", "mapped", "unknown"]
        draft = found["org/draft"]
        assert draft["predicted_gain"]["131072"] is None  # beyond its context
        assert draft["memory"]["131072"] is None
        gain = draft["predicted_gain"]["65536"]
        # A quarter of the layers for everything, the others for a fifth of it: less than 1 / (.25 + .2) for attention.
        assert 1 / (0.25 + 0.2) < gain < 1 / 0.25
        assert found["self"]["weights"] == 0

    def test_a_smaller_share_gains_more(self, hub: Hub) -> None:
        gains = [
            said("show", "org/target", "--keep-pct", keep)["drafts"][0]["predicted_gain"] for keep in ("0.1", "0.5")
        ]
        assert gains[0]["8192"] > gains[1]["8192"]

    def test_a_model_that_is_not_here_is_looked_up(self, hub: Hub, home: Path) -> None:
        here = said("show", "org/target")
        shutil.rmtree(home / "huggingface")
        hub.sent.clear()
        there = said("show", "org/target")
        assert (there["path"], there["place"], there["bytes"]) == (None, None, None)
        assert {name: there[name] for name in ("memory", "weights", "context", "support")} == {
            name: here[name] for name in ("memory", "weights", "context", "support")
        }
        assert hub.sent["model.safetensors"] == 100_001  # the head of its weights
        assert "not here: from the hub" in run("show", "org/target").stdout

    def test_a_pair_with_its_own_draft(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with hub_of() as empty:
            used_by_this_process(empty, home / "huggingface", monkeypatch)
            found = said("show", "demo")
        assert [Path(draft["id"]).name for draft in found["drafts"]] == ["draft", "self"]
        assert found["drafts"][0]["tokenizer"] == "same"

    def test_a_gguf_file(self, hub: Hub, lm_studio: Path) -> None:
        found = said("show", "org/packed/a.gguf")
        held = weight_bytes(load_pair("org/packed/a.gguf").target)
        assert (found["architecture"], found["weights"]) == ("llama", held)

    def test_an_architecture_that_is_not_exact(self, hub: Hub, home: Path) -> None:
        config = {"model_type": "gpt2", "n_ctx": 64, "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64}
        config |= {"layer_norm_epsilon": 1e-5, "vocab_size": 96}
        (home / "target" / "config.json").write_text(json.dumps(config))
        found = said("show", str(home / "target"))
        assert (found["support"], found["drafts"]) == ("full prefill only", [])
        assert "looked up by storage slot" in found["reason"]

    def test_what_is_nowhere(self, hub: Hub, home: Path) -> None:
        assert "has no model org/nothing" in refused("show", "org/nothing")
        assert "is neither a pair nor a repository id" in refused("show", "nothing")
        assert "there is no such folder or file" in refused("show", str(home / "nowhere"))
        assert "no pair 'x'" in refused("show", "x", "--pairs-file", str(stored.NAMED_PAIRS))


class TestRemove:
    def test_it_asks_and_deletes_from_the_cache(self, hub: Hub, home: Path) -> None:
        done = run("rm", "org/target", answer="n\n")
        assert done.exit_code == 1
        assert "Delete org/target, 0." in done.stderr
        assert find_model("org/target") is not None
        assert run("rm", "org/target", answer="y\n").exit_code == 0
        assert find_model("org/target") is None
        assert {repo.repo_id for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos} == {"org/draft"}
        assert not list((home / "huggingface").rglob("*target*"))

    def test_without_a_terminal_it_needs_yes(self, hub: Hub) -> None:
        assert run("rm", "org/target").exit_code == 1
        assert run("rm", "org/target", "--yes").exit_code == 0
        assert find_model("org/target") is None

    def test_what_an_interrupted_pull_left(self, hub: Hub, home: Path) -> None:
        blobs = home / "huggingface" / "hub" / "models--org--begun" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / "x.incomplete").write_bytes(b"x")
        assert run("rm", "org/begun", "--yes").exit_code == 0
        assert not blobs.parent.exists()

    def test_lm_studios_folder_only_when_it_is_said(self, hub: Hub, lm_studio: Path) -> None:
        words = refused("rm", "org/theirs", "--yes")
        assert f"is in LM Studio's folder, {lm_studio / 'theirs'}" in words
        assert (lm_studio / "theirs" / "config.json").exists()
        done = run("rm", "org/theirs", "--lm-studio", answer="y\n")
        assert "LM Studio will have it no more" in done.stderr
        assert not (lm_studio / "theirs").exists()
        assert (lm_studio / "packed" / "a.gguf").exists()

    def test_of_two_copies_the_one_in_the_cache(self, hub: Hub, lm_studio: Path) -> None:
        shutil.copytree(find_model("org/target") or Path(), lm_studio / "target")
        assert run("rm", "org/target", "--yes").exit_code == 0
        assert find_model("org/target") == lm_studio / "target"

    def test_of_several_gguf_files_none_alone(self, hub: Hub, lm_studio: Path) -> None:
        assert "names a file" in refused("rm", "org/packed/a.gguf", "--lm-studio", "--yes")
        assert run("rm", "org/packed", "--lm-studio", "--yes").exit_code == 0
        assert [path.name for path in lm_studio.iterdir()] == ["theirs"]

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("org/nothing", "org/nothing is not in Hugging Face's cache"),
            ("/etc", "/etc is not in Hugging Face's cache"),
            ("../huggingface", "is not in Hugging Face's cache"),
            ("org/packed", "is in LM Studio's folder"),
            ("org/packed/a.gguf", "names a file: a repository is removed as a whole"),
            ("demo", "pair 'demo' has no installed package"),
        ],
    )
    def test_nothing_else_is_deleted(self, hub: Hub, lm_studio: Path, name: str, words: str) -> None:
        assert words in refused("rm", name, "--yes")
        assert find_model("org/target") is not None


class TestRecommend:
    def test_what_fits_is_recommended_the_largest_first(self, hub: Hub) -> None:
        found = said("recommend", "--memory-limit", "96GB", "--context", "65536")
        weights = [pair["weights"] for pair in found["pairs"]]
        assert all(pair["memory"] <= found["memory_limit"] == 96 * 2**30 for pair in found["pairs"])
        assert {pair["target"].split("/")[1] for pair in found["pairs"]} >= {
            "Qwen3.5-122B-A10B-4bit",
            "gpt-oss-120b-MXFP4-Q8",
        }
        assert max(weights) == max(weights[:2])
        smaller = said("recommend", "--memory-limit", "16GB")["pairs"]
        assert {pair["target"] for pair in smaller} < {pair["target"] for pair in found["pairs"]}
        assert said("recommend", "--memory-limit", "1GB")["pairs"] == []
        assert "No pair of the table fits 1.0 GB" in run("recommend", "--memory-limit", "1GB").stdout

    def test_sizes_are_those_of_the_shapes(self) -> None:
        """122.1 and 1.88 billion weights at 4.5 bits; keys and values of 2 heads of 256 in 12 and 6 layers."""
        [pair] = [one for one in recommended(2**40, 65536, stored.Fraction(1, 5)) if "122B" in one.target.name]
        assert pair.draft is not None
        assert math.isclose(pair.target.weights, 122.1e9 * 4.5 / 8, rel_tol=1e-3)
        assert math.isclose(pair.draft.weights, 1.88e9 * 4.5 / 8, rel_tol=2e-3)
        keys_and_values = 65536 * (12 + 6) * 2 * 2 * 256 * 2
        assert 0 < pair.memory(65536) - pair.target.weights - pair.draft.weights - keys_and_values < 2**28
        assert pair.gain == shape_work("qwen3.5-122b-a10b", 65536, stored.Fraction(1, 5)).most_speedup

    def test_experts_have_bits_of_their_own(self) -> None:
        [pair] = [one for one in recommended(2**40, 8192, stored.Fraction(1, 5)) if "gpt-oss-120b" in one.target.name]
        assert math.isclose(pair.target.weights, 63e9, rel_tol=0.01)  # as its card in pairs.toml says

    def test_every_row_has_a_source_and_a_shape(self) -> None:
        pairs = recommended(2**60, 1024, stored.Fraction(1, 5))
        assert len(pairs) == TABLE.read_text().count("[[pair]]")
        assert all(pair.source for pair in pairs)
        assert all(pair.gain is not None and pair.gain > 1 for pair in pairs)
        assert "http" not in TABLE.read_text()
        assert SHAPES

    def test_what_is_here_is_marked(self, hub: Hub, lm_studio: Path) -> None:
        assert not any(pair["here"] for pair in said("recommend", "--memory-limit", "96GB")["pairs"])
        name = "mlx-community/gpt-oss-20b-MXFP4-Q8"
        (lm_studio.parent / name).parent.mkdir()
        (lm_studio / "theirs").rename(lm_studio.parent / name)
        here = [pair["target"] for pair in said("recommend", "--memory-limit", "96GB")["pairs"] if pair["here"]]
        assert here == [name]

    def test_beyond_a_models_context_nothing_is_predicted(self) -> None:
        found = said("recommend", "--memory-limit", "400GB", "--context", "200000")["pairs"]
        assert {pair["target"]: pair["predicted_gain"] for pair in found}["mlx-community/gpt-oss-120b-MXFP4-Q8"] is None

    def test_this_machine_is_asked_without_a_limit(self) -> None:
        limit = mx.device_info().get("max_recommended_working_set_size")
        assert said("recommend")["memory_limit"] == limit or limit is None
        assert "a size such as 512MB or 2GB is expected" in refused("recommend", "--memory-limit", "much")
