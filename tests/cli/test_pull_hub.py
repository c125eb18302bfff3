"""`mlx-specprefill pull` from a hub: a stand-in on this machine, the real huggingface_hub, no other network."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from huggingface_hub import constants, snapshot_download
from typer.testing import CliRunner, Result

from mlx_specprefill import find_model, load_pair
from mlx_specprefill_server import cli
from mlx_specprefill_server.cli.common import OptionError
from mlx_specprefill_server.cli.loading import load
from mlx_specprefill_server.pairs import Pair
from tests.support.gguf_files import tiny
from tests.support.hub import COMMIT, LARGE, Hub, hub_of, used_by_this_process
from tests.support.serving import heeds_ctrl_c
from tests.support.tiny import CONFIGS, save_checkpoint

WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the tries of huggingface_hub
    monkeypatch.setenv("HOME", str(tmp_path))
    with hub_of() as hub:
        used_by_this_process(hub, tmp_path / "huggingface", monkeypatch)
        hub.add("org/target", save_checkpoint(tmp_path / "target", "llama", 1))
        hub.add("org/draft", save_checkpoint(tmp_path / "draft", "qwen3", 2))
        assert len(hub.repositories["org/target"][WEIGHTS]) > 4 * LARGE
        yield hub


def pull(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["pull", *arguments])


def refused(*arguments: str) -> str:
    """Return the one line of the refusal."""
    done = pull(*arguments)
    assert done.exit_code == 2, done.output
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line


class TestAWholePull:
    def test_both_models_can_be_loaded_then(self, hub: Hub) -> None:
        done = pull("org/target", "--draft", "org/draft")
        assert done.exit_code == 0, done.output
        assert "mlx-specprefill serve --target org/target --draft org/draft" in done.stdout
        pair = load_pair("org/target", "org/draft")
        assert (pair.target_id, pair.draft_id, pair.sparse_refusal) == ("org/target", "org/draft", None)

    def test_the_cache_is_as_huggingface_hub_leaves_it(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        pull("org/target")
        hub.asked.clear()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        folder = Path(snapshot_download("org/target", allow_patterns=["*.json", WEIGHTS]))
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == hub.repositories["org/target"]
        assert folder.name == COMMIT
        assert (folder / WEIGHTS).is_symlink()
        assert not list(folder.parents[1].rglob("*.incomplete"))
        assert hub.asked == []

    def test_it_says_first_what_it_fetches_and_draws_nothing_where_nobody_watches(
        self, hub: Hub, capfd: pytest.CaptureFixture[str]
    ) -> None:
        said = pull("org/target").stderr
        files = hub.repositories["org/target"]
        assert said == f"org/target: {len(files)} files, {sum(map(len, files.values())) / 2**20:.1f} MB to fetch\n"
        assert capfd.readouterr().err == ""

    def test_only_files_that_loading_takes_are_fetched(self, hub: Hub) -> None:
        others = {"pytorch_model.bin": b"x" * 20_000, "README.md": b"text", "original.gguf": b"x" * 20_000}
        hub.repositories["org/target"] |= others
        assert pull("org/target").exit_code == 0
        assert not hub.sent.keys() & others.keys()

    def test_what_is_here_is_not_sent_again(self, hub: Hub) -> None:
        pull("org/target")
        sent = hub.sent[WEIGHTS]
        done = pull("org/target")
        assert done.exit_code == 0
        assert "0.0 MB to fetch" in done.stderr
        assert hub.sent[WEIGHTS] == sent

    def test_one_gguf_file(self, hub: Hub, tmp_path: Path) -> None:
        files = {f"{name}.gguf": tiny("llama").write(tmp_path / name).read_bytes() for name in ("a", "b")}
        hub.repositories["org/packed"] = files
        packed = "its GGUF files: org/packed/a.gguf, org/packed/b.gguf"
        assert f"org/packed has no model*.safetensors; {packed}" in refused("org/packed")
        assert f"org/packed has no c.gguf; {packed}" in refused("org/packed/c.gguf")
        done = pull("org/packed/b.gguf")
        assert done.exit_code == 0, done.output
        assert "a.gguf" not in hub.sent
        assert load_pair("org/packed/b.gguf").target_id == "b"

    def test_a_named_pair_of_repositories(self, hub: Hub, tmp_path: Path) -> None:
        pairs = tmp_path / "pairs.toml"
        pairs.write_text('[mine]\ntarget = "org/target"\ndraft = "org/draft"\n[folders]\ntarget = "./t"\n')
        assert pull("mine", "--pairs-file", str(pairs)).exit_code == 0
        assert None not in (find_model("org/target"), find_model("org/draft"))
        assert "--draft is a repository id and goes with one" in refused(
            "mine", "--pairs-file", str(pairs), "--draft", "org/draft"
        )
        assert "--draft is a repository id and goes with one" in refused("org/target", "--draft", "folder")

    def test_a_newer_commit_is_fetched(self, hub: Hub) -> None:
        pull("org/target")
        hub.repositories["org/target"]["generation_config.json"] = b'{"max_length": 5}'
        hub.commit = "0" * 40
        assert pull("org/target").exit_code == 0
        found = find_model("org/target")
        assert found is not None
        assert (found / "generation_config.json").read_bytes() == b'{"max_length": 5}'


class TestLoadingWhatIsNotHere:
    def test_it_is_fetched_first(self, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pair = load(Pair(target="org/target", draft="org/draft"), "auto")
        assert (pair.target_id, pair.draft_id, pair.sparse_refusal) == ("org/target", "org/draft", None)
        said = capsys.readouterr().err
        assert "org/target: " in said
        assert "MB to fetch" in said

    def test_what_memory_has_no_room_for_is_refused(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLX_SPECPREFILL_MEMORY_LIMIT", "1MB")
        with pytest.raises(OptionError, match=r"1\.0 MB may be used .* pull --force fetches it"):
            load(Pair(target="org/target", draft="self"), "auto")
        assert find_model("org/target") is None

    def test_a_command_says_in_one_line_what_the_hub_has_not(self, hub: Hub, tmp_path: Path) -> None:
        prompt = tmp_path / "prompt"
        prompt.write_text("Hi")
        asked = ["inspect", "--prompt-file", str(prompt), "--target", "org/nothing"]
        done = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, asked)
        assert done.exit_code == 2, done.output
        assert f"error: {hub.url} has no model org/nothing" in done.stderr


def unfinished(home: Path) -> list[str]:
    """Return the names of files on their way. os.walk passes over folders that go meanwhile."""
    return [name for _, _, names in os.walk(home) for name in names if name.endswith(".incomplete")]


class TestAnInterruptedPull:
    def test_a_broken_connection_goes_on_where_it_was(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        size = len(hub.repositories["org/target"][WEIGHTS])
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", size // 4)  # 10 MB; less of a chunk is lost
        hub.cut, hub.cuts = size // 4, 3
        assert pull("org/target").exit_code == 0
        begun = [headers.get("Range") for _, _, headers in hub.asked_apart]
        assert begun == [None, *(f"bytes={count * (size // 4)}-" for count in (1, 2, 3))]
        assert hub.sent[WEIGHTS] == size  # nothing twice

    def test_a_hub_that_goes_away_is_one_line_and_whole_files_are_kept(self, hub: Hub) -> None:
        there, hub.url_apart = hub.url_apart, "http://127.0.0.1:9"
        assert f"{hub.url} can't be reached" in refused("org/target")
        assert find_model("org/target") is None
        small = {name: count for name, count in hub.sent.items() if name != WEIGHTS}
        assert small
        hub.url_apart = there
        assert pull("org/target").exit_code == 0
        assert {name: hub.sent[name] for name in small} == small
        assert load_pair("org/target").target_id == "org/target"

    @pytest.mark.extended
    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
    def test_a_process_that_ends_keeps_whole_files(self, hub: Hub, tmp_path: Path, how: signal.Signals) -> None:
        """It ends at once, though a file is on its way, and after Ctrl-C nothing of that file is left."""
        hub.stalled = len(hub.repositories["org/target"][WEIGHTS]) // 2
        home = tmp_path / "huggingface"
        environment = {**os.environ, **hub.variables(home)}
        command = [sys.executable, "-m", "mlx_specprefill_server", "pull", "org/target"]
        with subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heeds_ctrl_c
        ) as process:
            until = time.monotonic() + 120
            while not any(unfinished(home)) or WEIGHTS not in hub.sent:
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < until
                time.sleep(0.05)
            process.send_signal(how)
            assert process.wait(60) == (-signal.SIGKILL if how == signal.SIGKILL else 130)
        assert not hub.released.is_set()
        assert bool(unfinished(home)) == (how == signal.SIGKILL)
        assert find_model("org/target") is None
        hub.stalled, before = None, dict(hub.sent)
        assert pull("org/target").exit_code == 0
        again = {name for name, count in hub.sent.items() if count > before.get(name, 0)}
        assert "config.json" not in again
        assert WEIGHTS in again
        assert load_pair("org/target").target_id == "org/target"


Usage = namedtuple("Usage", "total used free")


class TestWhatIsRefused:
    def test_a_full_disk(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40 - 2**20, 2**20))
        said = refused("org/target")
        assert "MB are to be fetched and 1.0 GB should stay free" in said
        assert "has 1.0 MB free" in said
        assert hub.sent == {}
        assert refused("org/target", "--force") == said

    def test_too_little_memory(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLX_SPECPREFILL_MEMORY_LIMIT", "1MB")
        said = refused("org/target", "--draft", "org/draft")
        # keys and values of 288 and 384 bytes a token in 16 bits, of the 4096 that these models were made for
        assert "3.1 MB of memory are needed at 32,768 tokens, and 1.0 MB may be used on this machine" in said
        assert hub.sent.keys() == {"config.json"}
        assert pull("org/draft", "--force").exit_code == 0

    def test_the_part_that_sees_is_not_loaded_and_not_counted(
        self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its files have 4 MB more than the language model."""
        folder = save_checkpoint(tmp_path / "seeing", "qwen3_5", 1)
        language = dict(mx.load(str(folder / WEIGHTS)))
        assert all(name.startswith("language_model.") for name in language)
        tower = {"vision_tower.patch_embed.weight": mx.zeros((1 << 20,))}
        mx.save_safetensors(str(folder / WEIGHTS), language | tower, {"format": "mlx"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vision_config": {}}))
        hub.add("org/seeing", folder)
        monkeypatch.setenv("MLX_SPECPREFILL_MEMORY_LIMIT", "4MB")
        assert pull("org/seeing").exit_code == 0
        monkeypatch.setenv("MLX_SPECPREFILL_MEMORY_LIMIT", "1MB")
        needed = sum(array.nbytes for array in language.values())
        assert needed < 3 << 20
        assert "of memory are needed" in refused("org/seeing")

    def test_what_could_not_be_loaded(self, hub: Hub) -> None:
        config = {**CONFIGS["llama"], "model_type": "unheard_of"}
        hub.repositories["org/target"]["config.json"] = json.dumps(config).encode()
        assert "org/target could not be loaded: mlx-lm has no architecture 'unheard_of'" in refused("org/target")
        assert pull("org/target", "--force").exit_code == 0

    def test_a_repository_without_a_model(self, hub: Hub) -> None:
        hub.repositories["org/text"] = {"README.md": b"text", "config.json": b"{}"}
        assert "org/text has no model*.safetensors; its GGUF files: none" in refused("org/text")

    def test_one_that_is_not_there(self, hub: Hub) -> None:
        assert f"{hub.url} has no model org/nothing, or it is private: check the name" in refused("org/nothing")

    @pytest.mark.parametrize("status", [401, 403])
    def test_one_that_is_gated(self, hub: Hub, status: int) -> None:
        hub.refused["org/target"] = (status, "GatedRepo")
        said = refused("org/target")
        assert f"org/target is gated: accept its conditions at {hub.url}/org/target" in said
        assert "HF_TOKEN" in said

    def test_one_whose_page_is_open_and_whose_files_are_not(self, hub: Hub) -> None:
        """As the hub has it for gated models."""
        hub.withheld["org/target"] = (401, "GatedRepo")
        assert "org/target is gated" in refused("org/target")

    def test_a_broken_hub(self, hub: Hub) -> None:
        hub.refused["org/target"] = (500, "")
        assert "org/target can't be fetched: Server error '500" in refused("org/target")

    def test_a_hub_that_does_not_answer(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert "http://127.0.0.1:9 can't be reached" in refused("org/target")

    def test_offline_mode(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        pull("org/target")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "offline mode is enabled. To disable it, please unset the `HF_HUB_OFFLINE`" in refused("org/draft")
        assert load(Pair(target="org/target"), "auto").target_id == "org/target"

    @pytest.mark.parametrize("name", ["nothing", "org/", "a/b/c"])
    def test_a_name_that_is_none(self, hub: Hub, name: str) -> None:
        assert f"no pair '{name}'" in refused(name)


def test_the_token_goes_to_the_hub_only(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    assert "org/target is gated" in refused("org/target")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert pull("org/target").exit_code == 0
    assert hub.asked_apart
    assert not any("Authorization" in headers for _, _, headers in hub.asked_apart)
