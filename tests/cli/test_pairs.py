"""pairs.toml: the one in the repository, and what a broken one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_specprefill_server import pairs
from mlx_specprefill_server.pairs import PairsError, find_pair, read_pairs


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
    others = {name: pair for name, pair in read_pairs(pairs.CLONE_PAIRS).items() if name not in BUNDLED}
    assert {"qwen3.5-35b", "qwen3.5-122b", "nemotron-h-120b", "gpt-oss-120b"} == set(others)
    assert all("never run here" in pair.note for pair in others.values())
    assert all(pair.draft for pair in others.values())


def test_folders_are_relative_to_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, '[a]\ntarget = "./t"\ndraft = "org/d"\n')
    pair = find_pair("a", path)
    assert pair.target == str(tmp_path.resolve() / "t")
    assert pair.draft == "org/d"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a]\n", "a.target"),
        ('[a]\ntarget = "t"\nkeep = 0.2\n', "a.keep"),
        ('[a]\ntarget = "t"\nkeep_pct = 2.0\n', "a.keep_pct"),
        ('[a]\ntarget = "t"\nthreshold = "many"\n', "a.threshold"),
        ('a = "t"\n', "a: "),
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
    monkeypatch.setattr(pairs, "CLONE_PAIRS", tmp_path / "models" / "pairs.toml")
    with pytest.raises(PairsError, match="--target and --draft"):
        find_pair("demo")
