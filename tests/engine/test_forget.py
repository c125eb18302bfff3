"""A prompt that its owner has forgotten is nowhere, and does not come back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_specprefill import (
    CacheLabel,
    Engine,
    EngineConfig,
    EngineError,
    Event,
    Finished,
    GenerationRequest,
    Progress,
    RequestCancelled,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
    Verdict,
    forget_files,
)
from mlx_specprefill.cache.prefix.disk import DiskTier
from mlx_specprefill.engine.thread import loop
from mlx_specprefill.engine.thread.background import BackgroundPrefill
from tests.support.tiny import generated, random_prompt, tiny_pair
from tests.support.waiting import eventually

ANN, BOB = CacheLabel("ann"), CacheLabel("bob")
SALTED = CacheLabel("ann", "salt")
LENGTH = 600
_FIRST = 7_000  # seed; no other test of this process may hold these prompts
SAMPLE = 24  # tokens that occur nowhere by chance
POLICY = SpecPrefillPolicy(threshold=60, keep_pct=Fraction(1, 5))
CONFIG = EngineConfig(policy=POLICY, prefill_step=64, prefix_cache_bytes=64 << 20)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """No background work until this is called, and no prompt of an earlier engine."""
    gc.collect()
    monkeypatch.setattr(loop.EngineCore, "_quiet_s", float("inf"))
    return lambda: monkeypatch.setattr(loop.EngineCore, "_quiet_s", 0.0)


def asked(seed: int, label: CacheLabel, sparse: bool = True, **more: Any) -> GenerationRequest:
    options = SpecPrefillOptions(sparse, verify="late" if sparse else None)
    return GenerationRequest(random_prompt(LENGTH, _FIRST + seed), 3, specprefill=options, label=label, **more)


def answered(engine: Engine, request: GenerationRequest) -> None:
    generated(engine.generate(request))


def samples(seed: int) -> Iterator[bytes]:
    """Parts of a prompt, one of each block, as they are stored in files and arrays."""
    prompt = np.asarray(random_prompt(LENGTH, _FIRST + seed), dtype="<i4")
    return (prompt[start : start + SAMPLE].tobytes() for start in range(0, LENGTH - SAMPLE, 100))


def files_with(folder: Path, seed: int) -> set[str]:
    parts = [part for sample in samples(seed) for part in (sample, sample.hex().encode())]
    contents = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name for name, content in contents.items() for part in parts if part in content}


@pytest.fixture(autouse=True)
def _new_objects_only() -> Iterator[None]:
    """Leave out of the search what other tests have left: the whole suite's heap takes minutes."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def memory_with(seed: int) -> list[str]:
    """The types of the objects that hold a part of a prompt, of those that this test has made."""
    parts, found, known = list(samples(seed)), list[str](), set[int]()
    for holder in gc.get_objects():
        for thing in gc.get_referents(holder):  # arrays are known to their holders only
            if id(thing) not in known and thing is not parts:
                known.add(id(thing))
                content = _bytes(thing)
                found += [f"{type(thing).__name__} of {type(holder).__name__}"] * any(part in content for part in parts)
    return found


def _bytes(thing: object) -> bytes:
    if isinstance(thing, np.ndarray) and thing.dtype.kind == "i" and thing.size >= SAMPLE:
        return thing.astype("<i4").tobytes()
    if isinstance(thing, list | tuple) and len(thing) >= SAMPLE and all(isinstance(one, int) for one in thing):
        return np.asarray([one % (1 << 31) for one in thing], dtype="<i4").tobytes()
    return bytes(thing) if isinstance(thing, bytearray) else b""


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=pytest.mark.extended)])
@pytest.mark.parametrize("idle", [True, False], ids=["read in idle time", "waits for idle time"])
def test_nothing_is_left_and_nothing_comes_back(
    family: str, idle: bool, tmp_path: Path, quiet: Callable[[], None]
) -> None:
    """The owner alone is forgotten, with and without a salt, in memory and on disk; others are not."""
    with Engine(tiny_pair(family), replace(CONFIG, prefix_cache_dir=tmp_path)) as engine:
        for seed, label in enumerate((ANN, SALTED, BOB)):
            answered(engine, asked(seed, label))
        if idle:
            quiet()
            assert eventually(lambda: engine.stats().densified == 3)
        assert eventually(lambda: bool(files_with(tmp_path, 0)))
        assert memory_with(0)
        engine.drop_cached(owner="ann")
        assert [files_with(tmp_path, seed) for seed in (0, 1)] == [set(), set()]
        assert [memory_with(seed) for seed in (0, 1)] == [[], []]
        quiet()
        assert eventually(lambda: engine.stats().densified == (3 if idle else 1))
        assert eventually(lambda: not engine.densifier.turns and not engine.caches.has_unsaved)
        assert engine.cached("ann") == ()
        assert {entry.kind for entry in engine.cached("bob")} >= {"target", "draft"}
    assert [bool(files_with(tmp_path, seed)) for seed in range(3)] == [False, False, True]
    with Engine(tiny_pair(family), replace(CONFIG, prefix_cache_dir=tmp_path)) as engine:
        assert engine.cached("ann") == ()
        _, last = generated(engine.generate(asked(2, BOB, sparse=False)))
        assert last.report.cached_tokens > 0


@pytest.mark.extended
def test_everybodys_prompts_go(quiet: Callable[[], None]) -> None:
    with Engine(tiny_pair(), CONFIG) as engine:
        for seed, label in enumerate((ANN, BOB, CacheLabel())):
            answered(engine, asked(seed, label))
        engine.drop_cached()
        assert [memory_with(seed) for seed in range(3)] == [[], [], []]
        quiet()
        answered(engine, asked(5, ANN))
        assert eventually(lambda: engine.stats().densified == 1)  # what is asked afterwards is kept as ever
        assert {entry.label for entry in engine.cached()} == {ANN}


class Held:
    """A request that stands still at one of its events until it is let go."""

    def __init__(self, engine: Engine, request: GenerationRequest, at: Callable[[Event], bool]) -> None:
        self.there, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.last: Event | None = None
        self.verdicts: list[Verdict] = []
        self._at = at
        self.handle = engine.submit(request, self._on_event, self.verdicts.append)
        assert self.there.wait(60)

    def _on_event(self, event: Event) -> None:
        if self._at(event) and not self.there.is_set():
            self.there.set()
            self.go.wait(60)
        if isinstance(event, Finished):
            self.last = event
            self.ended.set()


def forget_meanwhile(engine: Engine, held: Held, owner: str) -> None:
    """Ask for it while the MLX thread stands still, so that it comes before the request's next step."""
    asking = threading.Thread(target=engine.drop_cached, kwargs={"owner": owner})
    asking.start()
    assert eventually(lambda: bool(engine._inbox))
    held.go.set()
    asking.join(60)
    assert not asking.is_alive()


@pytest.mark.extended
@pytest.mark.parametrize("sparse", [False, True], ids=["full", "sparse"])
@pytest.mark.parametrize("cancelled", [False, True], ids=["to its end", "cancelled"])
@pytest.mark.parametrize("stage", ["queued", "prefill", "decode"])
def test_what_runs_goes_on_and_leaves_nothing(
    stage: str, cancelled: bool, sparse: bool, tmp_path: Path, quiet: Callable[[], None]
) -> None:
    def is_there(event: Event) -> bool:
        return isinstance(event, TokenEvent) if stage == "decode" else getattr(event, "stage", None) == stage

    quiet()
    with Engine(tiny_pair(), replace(CONFIG, prefix_cache_dir=tmp_path)) as engine:
        held = Held(engine, asked(0, ANN, sparse), is_there)
        forget_meanwhile(engine, held, "ann")
        if cancelled:
            held.handle.cancel()
        assert held.ended.wait(60)
        assert isinstance(held.last, Finished)
        assert cancelled or held.last.reason == "length"
        if sparse and not cancelled:
            assert eventually(lambda: bool(held.verdicts))
            assert [verdict.word for verdict in held.verdicts] == ["unknown"]
        answered(engine, asked(1, BOB))
        assert eventually(lambda: not engine.densifier.turns and engine.stats().densified == 1)
        assert engine.cached("ann") == ()
    assert memory_with(0) == []
    assert files_with(tmp_path, 0) == set()


def test_idle_work_stops_in_the_middle_and_its_verdict_is_told_once(
    monkeypatch: pytest.MonkeyPatch, quiet: Callable[[], None]
) -> None:
    there, go, verdicts = threading.Event(), threading.Event(), list[Verdict]()
    steps = BackgroundPrefill._steps

    def held(self: BackgroundPrefill, turn: Any) -> Any:
        for count, event in enumerate(work := steps(self, turn)):
            if count == 4 and isinstance(event, Progress) and not there.is_set():
                there.set()
                go.wait(60)
            try:
                yield event
            except RequestCancelled as error:
                return work.throw(error)

    monkeypatch.setattr(BackgroundPrefill, "_steps", held)
    with Engine(tiny_pair(), replace(CONFIG, target_itl_ms=0.01)) as engine:
        ended = threading.Event()
        request = asked(0, ANN)
        engine.submit(request, lambda event: ended.set() if isinstance(event, Finished) else None, verdicts.append)
        del request
        assert ended.wait(60)
        quiet()
        assert there.wait(60)
        asking = threading.Thread(target=engine.drop_cached, kwargs={"owner": "ann"})
        asking.start()
        assert eventually(lambda: bool(engine._inbox))
        go.set()
        asking.join(60)
        assert not engine.loop.jobs
        assert not engine.densifier.turns
        assert [verdict.word for verdict in verdicts] == ["unknown"]
        assert engine.cached() == ()
        assert memory_with(0) == []


def test_the_folder_is_rid_of_what_was_asked_of_other_models(tmp_path: Path, quiet: Callable[[], None]) -> None:
    """One that runs on the same folder, and one that does not run any more."""
    config = replace(CONFIG, prefix_cache_dir=tmp_path)
    with Engine(tiny_pair("qwen3"), config) as gone:
        answered(gone, asked(0, ANN))
        answered(gone, asked(1, BOB))
    assert files_with(tmp_path, 0)
    with Engine(tiny_pair(), config) as engine:
        answered(engine, asked(2, ANN))
        engine.drop_cached(owner="ann")
        assert [bool(files_with(tmp_path, seed)) for seed in range(3)] == [False, True, False]


@pytest.mark.extended
def test_files_are_forgotten_without_an_engine(tmp_path: Path, quiet: Callable[[], None]) -> None:
    for place in (tmp_path, tmp_path / "rank-1-of-2"):
        with Engine(tiny_pair(), replace(CONFIG, prefix_cache_dir=place)) as engine:
            for seed, label in enumerate((ANN, BOB)):
                answered(engine, asked(seed, label, sparse=False))
    forget_files(tmp_path, "ann")
    assert [bool(files_with(tmp_path, seed)) for seed in range(2)] == [False, True]
    forget_files(tmp_path, None)
    assert files_with(tmp_path, 1) == set()
    assert not list(tmp_path.rglob("*.safetensors"))
    forget_files(tmp_path / "nowhere", None)
    assert not (tmp_path / "nowhere").exists()


def test_a_dropped_entry_leaves_no_token_on_disk(tmp_path: Path, quiet: Callable[[], None]) -> None:
    with Engine(tiny_pair(), replace(CONFIG, prefix_cache_dir=tmp_path)) as engine:
        answered(engine, asked(0, ANN, sparse=False))
        answered(engine, asked(1, ANN, sparse=False))
        assert eventually(lambda: all(files_with(tmp_path, seed) for seed in (0, 1)))
        newest, _ = engine.cached()
        assert engine.drop_cached(newest.id)
        assert [bool(files_with(tmp_path, seed)) for seed in (0, 1)] == [True, False]


def test_what_the_disk_does_not_forget_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: Callable[[], None]
) -> None:
    def fail(_: DiskTier) -> None:
        raise OSError("no space left on device")

    with Engine(tiny_pair(), replace(CONFIG, prefix_cache_dir=tmp_path)) as engine:
        with monkeypatch.context() as broken:
            broken.setattr(DiskTier, "_erase", fail)
            with pytest.raises(EngineError, match="could not be deleted"):
                engine.drop_cached()
        assert engine.drop_cached()


@pytest.mark.parametrize("owners", [("ann",), ("ann", "bob"), (None,)], ids=str)
def test_forgetting_counts_from_the_time_of_each_request(owners: Sequence[str | None]) -> None:
    """Rank 0's clock goes with the request and with the order to forget."""
    with Engine(tiny_pair(), CONFIG) as engine:
        early, late = (
            {label: replace(asked(0, label), made=made) for label in (ANN, SALTED, BOB, CacheLabel())}
            for made in (10.0, 11.0)
        )
        for owner in owners:
            engine.caches.forget(owner, 10.5)
        for label, request in early.items():
            assert engine.caches.keeps(request) == (None not in owners and label.owner not in owners)
        assert all(engine.caches.keeps(request) for request in late.values())
