"""scripts/bench guard on its mechanics: turns, pairs, intervals, worktrees and the report. Nothing here is timed."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import guard
from benchmarks.guard import Commit, Pairs, checked_out, take_turns
from benchmarks.harness import servers
from benchmarks.harness.command import main
from benchmarks.harness.figures import median_interval
from benchmarks.harness.servers import Reply

pytestmark = pytest.mark.extended

FIGURES = """import_ms sparse_1k_ms sparse_4k_ms rest_ms full_4k_ms second_turn_ms decode_1_ms decode_8_ms
cpu_per_token_ms loop_per_token_us peak_mib""".split()


def rounds(step: Any, count: int) -> Pairs:
    pairs = Pairs()
    for turn in range(count):
        take_turns("old", "new", {"step": step}, turn, pairs)
    return pairs


class TestTurns:
    def test_the_arms_alternate_and_each_pair_has_a_number_of_its_own(self) -> None:
        asked: list[tuple[str, int]] = []

        def step(arm: str, number: int) -> dict[str, float]:
            asked.append((arm, number))
            return {"ms": 1.0 if arm == "old" else 2.0}

        pairs = rounds(step, 2)
        assert [arm for arm, _ in asked] == "old new new old new old old new".split()
        assert [number for _, number in asked] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert pairs.taken == {"ms": [(1.0, 2.0)] * 4}

    def test_what_drifts_meets_both_alike(self) -> None:
        """A machine that slows down by a third over the run; the new commit costs a tenth more."""
        clock = itertools.count()

        def step(arm: str, _: int) -> dict[str, float]:
            return {"ms": (1.1 if arm == "new" else 1.0) * (100 + next(clock))}

        found = rounds(step, 8).compared()["ms"]
        assert abs(found.ratio - 1.1) < 0.005
        assert (found.pairs, found.verdict) == (16, "more")


class TestInterval:
    @pytest.mark.parametrize(
        ("count", "ends"),
        [(5, (None, None)), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (20, (6, 15))],
    )
    def test_it_is_that_of_the_binomial_distribution(self, count: int, ends: tuple[Any, Any]) -> None:
        """The tables of confidence intervals for a median."""
        assert median_interval([float(value) for value in range(count, 0, -1)]) == ends


def git(folder: Path, *arguments: str) -> str:
    author = {f"GIT_{who}_{what}": "x@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **author}).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits of packages that say which of them they are, the third without any."""
    folder = tmp_path / "repository"
    packages = [folder / "mlx_specprefill", folder / "server" / "mlx_specprefill_server"]
    for package in packages:
        package.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    for name in ("one", "two"):
        for package in packages:
            (package / "__init__.py").write_text(f"NAME = {name!r}\n")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "--message", f"This is {name}")
    git(folder, "rm", "-r", "--quiet", ".")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "Nothing")
    return folder


class TestCommits:
    def test_each_is_imported_from_its_own_folder(self, repository: Path) -> None:
        with checked_out({"old": "HEAD~2", "new": "HEAD~1"}, repository) as commits:
            said = []
            for commit in commits:
                commit.check()
                program = "import mlx_specprefill, mlx_specprefill_server as b; print(mlx_specprefill.NAME, b.NAME)"
                environment = {**os.environ, **commit.environment}
                command = commit.command("-c", program)
                said.append(subprocess.check_output(command, env=environment, cwd=Path.cwd(), text=True).split())
            assert said == [["one", "one"], ["two", "two"]]
            assert [(commit.name, commit.title) for commit in commits] == [
                ("old", "This is one"),
                ("new", "This is two"),
            ]
            assert len(git(repository, "worktree", "list").splitlines()) == 3
        assert len(git(repository, "worktree", "list").splitlines()) == 1
        assert not commits[0].folder.exists()


class Canned:
    """A server that answers at once, and says that it took some time."""

    pid = os.getpid()

    def __init__(self, cost: float, report: Mapping[str, Any]) -> None:
        self.cost, self.report, self.asked, self.used = cost, report, list[tuple[str, dict[str, Any]]](), 0.0

    def ask(self, messages: list[dict[str, str]], tokens: int, **options: Any) -> Reply:
        self.asked.append((messages[-1]["content"], options))
        self.used += 1.0
        return Reply("x", self.cost, 2 * self.cost, tokens, 400, 0, dict(self.report))

    def cpu_s(self) -> float:
        return self.used

    def loop_s(self) -> float:
        return self.used / 100


TIMES = {"timings": {"draft_ms": 300.0, "prefill_ms": 200.0}}


def options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"old": "a", "new": "b", "seconds": 0.0, "tokens": 5, "long": 4000, **changes})


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Commits and servers that are none: the new one costs twice as much. What was started, in order.

    The clock goes on by a second whenever it is read, so what is timed takes both arms equally long.
    """
    begun: list[str] = []
    clock = map(float, itertools.count())
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=clock.__next__, perf_counter=clock.__next__))

    @contextmanager
    def commits(references: Mapping[str, str]) -> Iterator[list[Commit]]:
        yield [Commit(name, one * 40, f"This is {one}", tmp_path) for name, one in references.items()]

    @contextmanager
    def serving(commit: Commit, _: Any) -> Iterator[Any]:
        begun.append(commit.name)
        yield Canned(1.0 if commit.name == "old" else 2.0, TIMES)

    @contextmanager
    def copies(_: Any) -> Iterator[None]:
        yield None

    monkeypatch.setattr(guard, "checked_out", commits)
    monkeypatch.setattr(Commit, "check", lambda commit: None)
    monkeypatch.setattr(guard, "serving", serving)
    monkeypatch.setattr(servers, "copies", copies)
    monkeypatch.setattr(guard, "imported", lambda commit: {"import_ms": 1.0})
    monkeypatch.setattr(servers, "peak_bytes", lambda pid: 2**20)
    return begun


def test_the_report_is_one_line_of_json(faked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main("guard --old a --new b --seconds 0".split()) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1], parse_constant=pytest.fail)
    keys = "benchmark device blas mlx rounds seconds load old new more less figures".split()
    assert found.keys() == set(keys)
    assert (found["old"], found["rounds"]) == ({"commit": "a" * 40, "title": "This is a"}, guard.LEAST)
    assert found["figures"].keys() == set(FIGURES)
    sparse, peak = found["figures"]["sparse_1k_ms"], found["figures"]["peak_mib"]
    assert (sparse["ratio"], sparse["pairs"], sparse["verdict"]) == (2.0, 6, "more")
    assert (peak["ratio"], peak["pairs"], peak["verdict"]) == (1.0, 3, "too few pairs")
    assert "sparse_1k_ms" in found["more"]
    assert found["figures"]["decode_8_ms"]["verdict"] == "no difference seen"
    assert found["less"] == []
    assert faked == "old new old new new old old new".split()  # the first two only calibrate


def test_a_commit_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("guard --old no-such-branch".split()) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("error: git rev-parse --verify no-such-branch")
