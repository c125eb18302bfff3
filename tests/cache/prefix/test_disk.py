"""Records on disk come back bit for bit, or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill.cache.budget import ByteBudget
from mlx_specprefill.cache.prefix import disk
from mlx_specprefill.cache.prefix.disk import DiskTier, make_private
from mlx_specprefill.cache.prefix.disk_policy import StoredPrefixCache
from mlx_specprefill.cache.prefix.record_file import DiskRow, check, read_row
from tests.cache.prefix.disk_writer import FILE_BYTES, MAKE
from tests.cache.prefix.stores import BLOCK, fake_caches, filled, held_bytes, prompt_of, same
from tests.support.examples import examples
from tests.support.steps import finish

LARGE = 1 << 30
ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def opened(folder: Path, limit: int = LARGE, **settings: Any) -> Iterator[DiskTier]:
    tier = DiskTier(folder, limit, **settings)
    try:
        yield tier
    finally:
        tier.close()


@contextlib.contextmanager
def cached(
    folder: Path, make: Any = None, limit: int = LARGE, budget: int = LARGE, identity: str = "model", **settings: Any
) -> Iterator[StoredPrefixCache]:
    with opened(folder, limit, **settings) as tier:
        yield StoredPrefixCache(tier, False, identity, make or fake_caches(), ByteBudget(budget), block_size=BLOCK)


def row(key: str, namespace: str = "n", end: int = 1) -> DiskRow:
    return DiskRow(key, namespace, "", "", end, 0)


def records(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def found(prefixes: StoredPrefixCache, tokens: Any) -> int:
    """Length of a hit, which has to be right."""
    hit = prefixes.lookup(tokens)
    if hit is None:
        return 0
    assert same(hit.cache, filled(prefixes._layout._make, tuple(tokens)[: hit.length]))
    return hit.length


# --- records ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [True, False])
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, flushed: bool) -> None:
    bits = mx.array(np.random.default_rng(0).integers(0, 2**16, (2, 3, 8)).astype(np.uint16))
    arrays = {
        "bf16": bits.view(mx.bfloat16),  # with NaNs, infinities and denormals
        "f16": bits.view(mx.float16),
        "f32": bits.view(mx.float32),
        "u32": bits.view(mx.uint32),  # packed weights
        "i32": mx.array([-1], dtype=mx.int32),
        "u8": bits.astype(mx.uint8),
        "i64": mx.array([[-(2**40)]], dtype=mx.int64),
        "bool": bits > 30000,
        "c64": mx.array([1 + 2j]),
        "scalar": mx.array(3.5),
        "empty": mx.zeros((1, 2, 5, 0)),
        "view": bits.view(mx.bfloat16)[:, ::2, 1:5],
    }
    with opened(tmp_path) as tier:
        assert tier.write(row("ab"), arrays)
        if flushed:
            tier.flush()
        (back,) = finish(tier.read(["ab"], "n"))
    assert back is not None
    assert set(back) == set(arrays)
    for name, array in arrays.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape), name
        assert _raw(back[name]) == _raw(array), name


def _raw(array: mx.array) -> bytes:
    array = mx.contiguous(array)
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array).tobytes()


def test_records_are_read_in_order_and_only_a_few_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged record is left out, and the others come."""
    keys = [f"{number:02x}" for number in range(12)]
    with opened(tmp_path) as tier:
        for number, key in enumerate(keys):
            assert tier.write(row(key), {"a": mx.full((100,), float(number))})
    _flip(tmp_path / "04.safetensors")
    begun: list[Path] = []
    monkeypatch.setattr(disk, "check", lambda file, *named: begun.append(Path(file.name)) or check(file, *named))
    with opened(tmp_path) as tier:
        assert len(tier.rows("n")) == len(keys)
        steps = tier.read([*keys, "ff"], "n")
        next(steps)
        assert len(begun) <= 2 + disk._READERS
        *found, unknown = finish(steps)
        assert unknown is None  # nothing was stored under the last key
        assert [arrays and arrays["a"][0].item() for arrays in found] == [0, 1, 2, 3, None, *range(5, 12)]
        assert not tier.has("04")


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_prefixes_survive_a_restart(tmp_path: Path, dtype: mx.Dtype) -> None:
    make = fake_caches(stateful=True, window=6, dtype=dtype)
    prompts = [tuple(range(seed, seed + 30)) for seed in (0, 100, 200)]
    with cached(tmp_path, make) as prefixes:
        for prompt in prompts:
            prefixes.store(prompt[:16], filled(make, prompt[:16]))
            prefixes.store(prompt, filled(make, prompt))
    with cached(tmp_path, make) as prefixes:
        assert prefixes.nbytes == 0
        assert len(prefixes.entries()) == 6
        for prompt in prompts:
            hit = prefixes.lookup((*prompt, 1))
            assert hit.length == 30
            reference = filled(make, prompt)
            assert same(hit.cache[:3], reference[:3])
            assert hit.cache[0].keys.dtype == dtype
            assert found_ring(hit.cache[3]) == found_ring(reference[3])
        assert prefixes.nbytes == held_bytes(prefixes) > 0


def found_ring(ring: Any) -> bytes:
    return _raw(ring.keys[..., -ring.max_size :, :])


def test_what_memory_evicts_is_served_from_disk(tmp_path: Path) -> None:
    make = fake_caches()
    with cached(tmp_path, make, budget=4000) as prefixes:
        for base in range(0, 4000, 100):
            prefixes.store(range(base, base + 20), filled(make, range(base, base + 20)))
            assert held_bytes(prefixes) == prefixes._budget.used <= 4000
        for base in range(0, 4000, 100):
            assert found(prefixes, range(base, base + 50)) == 20
            assert held_bytes(prefixes) == prefixes._budget.used <= 4000


def test_drop_and_clear_reach_the_disk(tmp_path: Path) -> None:
    make = fake_caches()
    with cached(tmp_path, make) as prefixes, opened(tmp_path) as tier:
        other = StoredPrefixCache(tier, False, "other", make, ByteBudget(LARGE), block_size=BLOCK)
        other.store(range(20), filled(make, range(20)))
        assert found(prefixes, range(20)) == 0
        for base in (0, 100):
            prefixes.store(range(base, base + 20), filled(make, range(base, base + 20)))
        assert prefixes.drop(prefixes.entries()[0].id)
        prefixes.disk.flush()
        tier.flush()
        assert len(records(tmp_path)) == 6
        prefixes.clear()
    assert len(records(tmp_path)) == 3
    with cached(tmp_path, make) as prefixes:
        assert prefixes.entries() == []
    with cached(tmp_path, make, identity="other") as prefixes:
        assert found(prefixes, range(20)) == 20


def test_the_byte_limit_holds_and_the_oldest_use_goes_first(tmp_path: Path) -> None:
    make = fake_caches()
    with cached(tmp_path, make) as prefixes:
        prefixes.store(range(20), filled(make, range(20)))
    one = sum(path.stat().st_size for path in records(tmp_path))
    with cached(tmp_path, make, limit=4 * one + 10, budget=0) as prefixes:
        for base in range(100, 400, 100):
            prefixes._budget.most = LARGE
            prefixes.store(range(base, base + 20), filled(make, range(base, base + 20)))
            prefixes._budget.shrink(LARGE)
        assert found(prefixes, range(20)) == 20  # now the one that was used last
        for base in range(400, 600, 100):
            prefixes.store(range(base, base + 20), filled(make, range(base, base + 20)))
            prefixes._budget.shrink(LARGE)
        prefixes.disk.flush()
        assert sum(path.stat().st_size for path in records(tmp_path)) <= 4 * one + 10
        kept = [base for base in (0, 100, 200, 300, 400, 500) if found(prefixes, range(base, base + 20)) == 20]
    assert kept == [0, 300, 400, 500]


# --- damage -----------------------------------------------------------------------------------------------------------


def stored(folder: Path) -> list[Path]:
    """Three blocks and a tail of one prompt; the files in the order of their tokens."""
    with cached(folder) as prefixes:
        prefixes.store(range(28), filled(fake_caches(), range(28)))
    return sorted(records(folder), key=lambda path: row_of(path).end)


def row_of(path: Path) -> DiskRow:
    with path.open("rb") as file:
        return read_row(file)[0]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_damaged_file_is_never_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = stored(tmp_path)[2]
    _flip(path)
    with caplog.at_level(logging.WARNING), cached(tmp_path) as prefixes:
        assert found(prefixes, range(28)) == 16
        assert path.name in caplog.text
        prefixes.store(range(28), filled(fake_caches(), range(28)))  # and can be stored again
        prefixes._budget.shrink(LARGE)
        assert found(prefixes, range(28)) == 28


def test_a_missing_file_is_a_miss(tmp_path: Path) -> None:
    path = stored(tmp_path)[2]
    with cached(tmp_path) as prefixes:
        path.unlink()
        assert found(prefixes, range(28)) == 16
    assert len(records(tmp_path)) == 2


def test_a_file_of_another_identity_is_never_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not even one that lies in the place of ours, and is as it was written."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    path = stored(ours)[0]
    with cached(theirs, identity="other") as prefixes:
        prefixes.store(range(8), filled(fake_caches(), range(8)))
    with caplog.at_level(logging.WARNING), cached(ours) as prefixes:
        path.write_bytes(records(theirs)[0].read_bytes())
        assert found(prefixes, range(28)) == 0
    assert "belongs elsewhere" in caplog.text


def test_what_no_record_is_is_swept_up_and_strangers_left_alone(tmp_path: Path) -> None:
    stored(tmp_path)
    names = ["ab12.safetensors", "ab12-state.safetensors", "pinned/ab12.safetensors", "ab12.77-0.tmp"]
    swept = [tmp_path / name for name in names]
    strangers = [tmp_path / "model.safetensors", tmp_path / "notes.txt", tmp_path / "x.tmp", tmp_path / "ab12.77-1.tmp"]
    for path in (*swept, *strangers):
        path.write_bytes(b"?")
    os.utime(swept[-1], (0, 0))  # the other one may be another process's at work
    with cached(tmp_path) as prefixes:
        assert found(prefixes, range(28)) == 28
    assert not any(path.exists() for path in swept)
    assert all(path.exists() for path in strangers)


def test_a_folder_of_a_former_version_is_cleared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its records said nothing of themselves; an index did."""
    (tmp_path / "index.sqlite").write_bytes(b"SQLite format 3")
    metadata = {"format": "mlx-specprefill-prefix", "version": "1", "key": "ab12", "namespace": f"model:{BLOCK}"}
    mx.save_safetensors(str(tmp_path / "ab12.safetensors"), {"0.keys": mx.zeros(4)}, metadata)
    with caplog.at_level(logging.WARNING), cached(tmp_path) as prefixes:
        assert "former version: its 1 records are deleted" in caplog.text
        assert found(prefixes, range(28)) == 0
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_a_use_in_the_future_is_no_reason_to_keep_a_record(tmp_path: Path) -> None:
    paths = stored(tmp_path)
    for path in paths:
        os.utime(path, (4e9, 4e9))
    size = sum(path.stat().st_size for path in paths)
    with cached(tmp_path, limit=size) as prefixes:
        prefixes.store(range(100, 128), filled(fake_caches(), range(100, 128)))
        prefixes.disk.flush()
        prefixes._budget.shrink(LARGE)
        assert found(prefixes, range(100, 128)) == 28


def _bits(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 8, 100])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _head(path: Path, rng: random.Random) -> None:
    """Another value where the head says something, as long as before."""
    data = path.read_bytes()
    places = [match.start() for match in re.finditer(rb"[0-9a-f]", data[: data.index(b"}}")])]
    at = rng.choice(places)
    path.write_bytes(data[:at] + rng.choice(b"0123456789abcdef").to_bytes() + data[at + 1 :])


SPOIL: dict[str, Any] = {
    "bits": _bits,
    "the head": _head,
    "cut": lambda path, rng: path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)]),
    "garbage": lambda path, rng: path.write_bytes(rng.randbytes(rng.randrange(20_000))),
    "missing": lambda path, rng: path.unlink(),
    "a folder": lambda path, rng: (path.unlink(), path.mkdir()),
    "closed": lambda path, rng: path.chmod(0),
}


@pytest.mark.parametrize("how", SPOIL)
def test_whatever_the_folder_holds_a_start_works(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Damage is left out, said at one start, and stored again."""
    stored(tmp_path / "kept")
    for seed in range(examples(100)):
        rng, folder = random.Random(f"{how}{seed}"), tmp_path / str(seed)
        shutil.copytree(tmp_path / "kept", folder)
        path = rng.choice(records(folder))
        SPOIL[how](path, rng)
        for _ in range(2):
            caplog.clear()
            with cached(folder) as prefixes:
                found(prefixes, range(28))
                prefixes.store(range(28), filled(fake_caches(), range(28)))
                assert found(prefixes, range(28)) == 28
        assert how == "a folder" or not caplog.records, (seed, path, caplog.text)


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"), opened(tmp_path / "file" / "cache"):
        pass


def test_a_folder_that_turns_read_only_is_a_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Or a full disk, or one that goes away."""
    with cached(tmp_path) as prefixes:
        prefixes.disk.folder = tmp_path / "gone"
        prefixes.store(range(20), filled(fake_caches(), range(20)))
        prefixes.disk.flush()
        assert caplog.text.count("could not write") == 1
        assert found(prefixes, range(20)) == 20
        prefixes._budget.shrink(LARGE)
        prefixes.disk.flush()
        assert found(prefixes, range(20)) == 0


@pytest.mark.parametrize("stateful", [False, True])
def test_what_disk_lost_is_stored_again(tmp_path: Path, stateful: bool) -> None:
    """Also when no look-up noticed the loss."""
    make = fake_caches(stateful)
    for lost in range(4 + stateful):
        with cached(tmp_path / str(lost), make) as prefixes:
            prefixes.store(range(28), filled(make, range(28)))
            prefixes._budget.shrink(LARGE)
            nodes = [record for node in prefixes._nodes() for record in node.records()]
            prefixes.disk.remove([nodes[lost].key])
            prefixes.store(range(28), filled(make, range(28)))
            assert found(prefixes, range(28)) == 28


# --- several processes, sudden ends -----------------------------------------------------------------------------------


def test_two_tiers_on_one_folder(tmp_path: Path) -> None:
    """The second sees what the first had written, and neither disturbs the other."""
    make = fake_caches()
    with cached(tmp_path, make) as one:
        one.store(range(20), filled(make, range(20)))
        one.disk.flush()
        with cached(tmp_path, make) as two:
            assert found(two, range(20)) == 20
            for base in range(100, 1000, 100):
                for prefixes in (one, two):
                    prefixes.store(range(base, base + 20), filled(make, range(base, base + 20)))
            two.clear()
            two.disk.flush()
            one.disk.flush()
            one._budget.shrink(LARGE)
            assert [found(one, range(base, base + 20)) in (0, 8, 16, 20) for base in range(0, 1000, 100)] == [True] * 10
    with cached(tmp_path, make) as prefixes:
        for base in range(0, 1000, 100):
            found(prefixes, range(base, base + 20))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.nightly)])
@pytest.mark.extended
def test_kill_9_during_writes_many_times(tmp_path: Path, times: int) -> None:
    """Whatever moment a process dies at, the next one opens the folder and serves nothing that is wrong."""
    rng, served, number = random.Random(0), 0, 0
    until = time.monotonic() + 120  # fifteen seconds, but minutes where others keep the disk busy: then fewer will do
    with writers(tmp_path) as start:
        while number < times and (number < 10 or time.monotonic() < until):
            process = start(number)
            assert process.stdout.readline().startswith("ready"), "the folder could not be opened"
            # Some die before they have written anything, some in their first record, some leave a whole prompt, of up
            # to eight records: a file comes, gets its name, the next one comes. So it is on a slow disk, too.
            for _ in range((0, 1, 2, 16)[number % 4]):
                _wait_for_a_change(tmp_path)
            time.sleep(rng.uniform(0.0, 0.03))
            assert process.poll() is None, "the writer ended by itself"
            process.send_signal(signal.SIGKILL)
            process.wait()
            number += 1
            if number % 5 == 0:
                with cached(tmp_path, MAKE, limit=FILE_BYTES) as prefixes:
                    served += sum(_served(prefixes, prompt_of(seed)) for seed in range(40))
    assert served > number**2 / 50, "the writers left too little to check"
    _folder_is_consistent(tmp_path)


def _wait_for_a_change(folder: Path) -> None:
    before, deadline = {path.name for path in folder.iterdir()}, time.monotonic() + 60
    while {path.name for path in folder.iterdir()} == before and time.monotonic() < deadline:
        time.sleep(0.001)


def _served(prefixes: StoredPrefixCache, prompt: tuple[int, ...]) -> bool:
    hit = prefixes.lookup(prompt)
    if hit is None:
        return False
    reference = filled(prefixes._layout._make, prompt[: hit.length])
    assert same(hit.cache[:3], reference[:3])
    assert found_ring(hit.cache[3]) == found_ring(reference[3])
    return True


def _folder_is_consistent(folder: Path) -> None:
    for path in folder.glob("*.tmp"):
        os.utime(path, (0, 0))
    with opened(folder) as tier:
        rows = tier.rows(f"model:{BLOCK}")
    assert {path.stem for path in records(folder)} == {row.key for row in rows}
    assert sum(path.stat().st_size for path in records(folder)) <= FILE_BYTES
    assert not list(folder.rglob("*.tmp"))


@contextlib.contextmanager
def writers(folder: Path) -> Iterator[Any]:
    """Starts processes that write into the folder; kills what is left of them."""
    running: list[subprocess.Popen[str]] = []
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}

    def start(seed: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.cache.prefix.disk_writer", str(folder), str(7 * seed)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        running.append(process)
        return process

    try:
        yield start
    finally:
        for process in running:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


# --- privacy ----------------------------------------------------------------------------------------------------------


def open_to_others(folder: Path) -> dict[str, str]:
    """The folder and the files in it that anybody but their owner may do anything with, and their modes."""
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    return {name: oct(mode) for name, mode in modes.items() if mode & 0o077}


@contextlib.contextmanager
def everybody_may_read() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def test_nobody_else_can_read_what_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with everybody_may_read(), cached(folder) as prefixes:
        prefixes.store(range(28), filled(fake_caches(), range(28)))
        prefixes.disk.flush()
        assert "pinned" in {path.name for path in folder.iterdir()}
        assert records(folder)
        assert open_to_others(folder) == {}
    assert open_to_others(folder) == {}
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_a_new_folder_is_kept_out_of_time_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, fails: bool
) -> None:
    asked: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], **_: Any) -> None:
        asked.append(command)
        if fails:
            raise subprocess.TimeoutExpired(command, 10)

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):  # a user may have taken an older one in again
        make_private(tmp_path / "prompts")
    expected = [("/usr/bin/tmutil", "addexclusion", str(tmp_path / "prompts"))]
    assert asked == (expected if system == "darwin" else [])


def test_a_folder_of_before_is_closed_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    for path in (tmp_path, *tmp_path.iterdir()):
        path.chmod(0o777)
    with caplog.at_level(logging.WARNING), cached(tmp_path) as prefixes:
        assert found(prefixes, range(28)) == 28
        assert open_to_others(tmp_path) == {"notes.txt": "0o777"}  # not ours
    assert "was open to others" in caplog.text
    caplog.clear()
    with cached(tmp_path):
        assert "was open to others" not in caplog.text


def test_nothing_is_kept_in_a_folder_that_is_everybodys(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(OSError, match="not this user's alone"), opened(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
