"""Repacked weights of GGUF files are kept: the same arrays, never those of another file, never half a file."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from gguf import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten
from typer.testing import CliRunner

from mlx_specprefill import load_pair, repacked_files
from mlx_specprefill.loading.gguf import load_gguf, repacked, weights
from mlx_specprefill_server import cli
from tests.support.gguf_files import CONFIGS, contents, random_weights

CONFIG = CONFIGS["llama"]
Conversions = list[str]


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Conversions:
    """The tensors that were repacked, where files of any size are worth keeping."""
    found: Conversions = []
    real = weights.read_arrays

    def spy(info, *arguments, **options):
        found.append(info.name)
        return real(info, *arguments, **options)

    monkeypatch.setattr(weights, "read_arrays", spy)
    monkeypatch.setattr(repacked, "_SMALLEST", 0)
    return found


def write(path: Path, seed: int = 0) -> Path:
    return contents("llama", CONFIG, random_weights(CONFIG, seed), lambda _: Kind.Q4_0).write(path)


def written(run: Callable[[], object]) -> None:
    """Run, then wait for the threads that it started."""
    before = set(threading.enumerate())
    run()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)


def load(file: Path, folder: Path | None, **options) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    written(lambda: found.update(tree_flatten(load_gguf(file, repacked=folder, **options)[0].parameters())))
    return found


def same(first: dict[str, mx.array], second: dict[str, mx.array]) -> bool:
    kinds = [{name: array.dtype for name, array in each.items()} for each in (first, second)]
    return kinds[0] == kinds[1] and all(mx.array_equal(array, second[name]).item() for name, array in first.items())


@pytest.mark.parametrize("dtype", [None, mx.float32, mx.bfloat16])
def test_the_second_load_repacks_nothing(tmp_path: Path, conversions: Conversions, dtype) -> None:
    file, folder = write(tmp_path / "a.gguf"), tmp_path / "kept"
    plain = load(file, None, dtype=dtype)
    assert same(plain, load(file, folder, dtype=dtype))
    conversions.clear()
    progress: list[tuple[int, int]] = []
    again = load(file, folder, dtype=dtype, on_progress=lambda *seen: progress.append(seen))
    assert same(plain, again)
    assert conversions == []
    assert progress[-1][0] == progress[-1][1] > 0


def test_unpacked_weights_are_not_kept(tmp_path: Path, conversions: Conversions) -> None:
    """Six to eight times the bytes are read no faster than the file is converted."""
    file, folder = write(tmp_path / "a.gguf"), tmp_path / "kept"
    load(file, folder, pack=False)
    assert not folder.exists()


@pytest.mark.parametrize("same_time", [True, False])
def test_a_changed_file_is_repacked(tmp_path: Path, conversions: Conversions, same_time: bool) -> None:
    """The name and size are the same, and in one case the time."""
    file, folder = write(tmp_path / "a.gguf"), tmp_path / "kept"
    load(file, folder)
    then = file.stat()
    write(file, seed=1)
    assert file.stat().st_size == then.st_size
    if same_time:
        os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert same(load(file, folder), load(file, None))
    conversions.clear()
    assert same(load(file, folder), load(file, None, pack=True))
    assert len(conversions) == len(set(conversions))  # those of the load that keeps nothing
    assert [source for _, source in repacked_files(folder)] == [str(file)]


@pytest.mark.parametrize("left", [0, 7, 1000, -1])
def test_a_damaged_file_is_written_again(tmp_path: Path, conversions: Conversions, left: int) -> None:
    file, folder = write(tmp_path / "a.gguf"), tmp_path / "kept"
    plain = load(file, folder)
    [(kept, _)] = repacked_files(folder)
    kept.write_bytes(kept.read_bytes()[:left])
    assert same(load(file, folder), plain)
    conversions.clear()
    load(file, folder)
    assert conversions == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_write_that_was_interrupted_leaves_nothing(tmp_path: Path, conversions: Conversions, monkeypatch) -> None:
    file, folder = write(tmp_path / "a.gguf"), tmp_path / "kept"
    with monkeypatch.context() as ends:
        ends.setattr(os, "fsync", lambda _: sys.exit())  # the process ends before the file is whole
        plain = load(file, folder)
    assert [path.name for path in folder.glob("*.part.safetensors")] != []
    assert list(repacked_files(folder)) == []
    conversions.clear()
    assert same(load(file, folder), plain)
    assert conversions != []
    assert len(list(repacked_files(folder))) == 1


def test_two_starts_at_once(tmp_path: Path, conversions: Conversions) -> None:
    """While another process writes, this one keeps nothing."""
    file, folder = write(tmp_path / "a.gguf"), tmp_path / "kept"
    load(file, folder)
    [(kept, _)] = repacked_files(folder)
    kept.unlink()
    holds = "import fcntl,sys; f=open(sys.argv[1],'w'); fcntl.flock(f,fcntl.LOCK_EX); print(1,flush=True); input()"
    command = [sys.executable, "-c", holds, str(kept.with_suffix(".lock"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        load(file, folder)
        assert not kept.exists()
        other.communicate("\n", timeout=60)
    load(file, folder)
    assert kept.exists()


def test_a_full_disk_keeps_none(tmp_path: Path, conversions: Conversions, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = write(tmp_path / "a.gguf"), tmp_path / "kept"
    disk = namedtuple("disk", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk(1 << 40, 0, (1 << 40) // 10 + 1000))
    load(file, folder)
    assert list(repacked_files(folder)) == []


def test_a_disk_that_fills_up_is_left_as_it_was(
    tmp_path: Path, conversions: Conversions, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota, which the disk's numbers don't show: writes of more than 4 KB fail."""
    file, folder = write(tmp_path / "a.gguf"), tmp_path / "kept"
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        load(file, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert f"the repacked weights of {file} are not kept: " in caplog.text
    assert list(folder.glob("*.safetensors")) == []


def test_small_files_are_not_kept(tmp_path: Path) -> None:
    load(write(tmp_path / "a.gguf"), tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_a_process_ends_when_the_weights_are_written(tmp_path: Path) -> None:
    source = tmp_path / "a.gguf"
    source.touch()
    code = f"""
from pathlib import Path
import mlx.core as mx
from mlx_specprefill.loading.gguf import repacked
repacked._SMALLEST = 0
arrays = {{str(i): mx.zeros((1 << 20,)) for i in range(64)}}
mx.eval(arrays)
repacked.Repacked(Path({str(tmp_path)!r}), Path({str(source)!r}), "float16").keep(arrays)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert [path for _, path in repacked_files(tmp_path)] == [str(source)]


def test_a_pair_keeps_its_models_and_list_shows_them(
    tmp_path: Path, conversions: Conversions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SPECPREFILL_CALIBRATION_FILE", str(tmp_path / "costs.json"))
    file, folder = write(tmp_path / "a.gguf"), tmp_path / "repacked"
    written(lambda: load_pair(file, dtype="float16", repacked=folder))
    [(kept, _)] = repacked_files(folder)
    lines = CliRunner().invoke(cli.app, ["list"]).stdout.splitlines()
    [shown] = [line for line in lines if line.startswith(str(file))]
    assert shown.endswith(f"rm {kept}")
    assert "REPACKED WEIGHTS OF" in "\n".join(lines)
