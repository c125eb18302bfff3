"""Two commits against each other on eleven figures, in three minutes: for contributors, before a change is proposed.

Each commit is checked out into a git worktree of its own and run by this environment's Python; both get the same copies
of the models. In every round a server of each is started, and every figure is taken old, new, new, old (in every second
round the other way round), so that what drifts on the machine meets both alike. All figures are costs:

    import_ms         a process that imports the command and prints its version
    sparse_1k_ms      time to first token of 1000 tokens, over HTTP, prefilled sparsely
    sparse_4k_ms      the same of 4000 tokens; `rest_ms`: of that, what is neither the draft's nor the target's prefill
    full_4k_ms        the same in full
    second_turn_ms    time to first token of a session's next turn after a sparse one of 2000 tokens
    decode_1_ms       milliseconds per token of one stream, decode_8_ms of eight at once, per token of all of them
    cpu_per_token_ms  processor time of the server per token of those eight; `loop_per_token_us`: of its event loop
                      alone, the requests' share included (Linux)
    peak_mib          the most memory that the server has held, at the end of the round

Printed is the median of new / old over the pairs with its 95 % interval, which takes six pairs; "more" and "less" are
said where that leaves out 1. In two of five runs one of the figures is outside by chance: run it again. It says what
changed on this machine, for these models; a figure to be quoted takes an idle machine and more rounds (`--seconds`).
Nobody judges by it automatically: CI does not run it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .harness import BenchError, servers
from .harness.figures import machine, median_interval, rounded, show
from .harness.servers import DENSE, SPARSE, Copies, Server, together
from .harness.text import Text, following, user

ROOT = Path(__file__).resolve().parents[2]
WHERE = "import mlx_specprefill as a, mlx_specprefill_server as b; print(a.__file__); print(b.__file__)"
QUICK = {"seconds": 0.0, "tokens": 16, "long": 1500}
STREAMS = 8
SHORT = 1000  # tokens of the short prompt
SESSION = 2000  # of a session's first turn
LEAST = 3  # rounds: fewer have no interval
OPTIONS = ("--specprefill-threshold", "512")


# --- two commits side by side ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit and its files.

    Attributes:
        name: of the arm; `title`: the first line of its message.
    """

    name: str
    sha: str
    title: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Return an environment in which Python with `-P` imports this commit."""
        return {"PYTHONPATH": os.pathsep.join([str(self.folder), str(self.folder / "server")])}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", *arguments]

    def check(self) -> None:
        """
        Raises:
            BenchError: what is imported lies elsewhere, or can't be.
        """
        environment = {**os.environ, **self.environment}
        done = subprocess.run(
            self.command("-c", WHERE), env=environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise BenchError(f"{self.name}, {self.sha[:12]}, can't be imported: {done.stderr.strip()[-400:]}")
        for file in done.stdout.split():
            if self.folder not in Path(file).parents:
                raise BenchError(f"{self.name}: {file} is imported instead of the files in {self.folder}")


@contextmanager
def checked_out(references: Mapping[str, str], repository: Path = ROOT) -> Iterator[list[Commit]]:
    """Yield the commits' folders until the block ends.

    Args:
        references: name of the arm -> commit, branch or tag.

    Raises:
        BenchError: one of them is no commit of the repository, or this is no repository.
    """
    found = {name: _git(repository, "rev-parse", "--verify", f"{one}^{{commit}}") for name, one in references.items()}
    with tempfile.TemporaryDirectory(prefix="commits-") as place, ExitStack() as stack:
        commits = []
        for name, sha in found.items():
            folder = Path(place).resolve() / name
            _git(repository, "worktree", "add", "--quiet", "--detach", str(folder), sha)
            stack.callback(_git, repository, "worktree", "remove", "--force", str(folder))
            commits.append(Commit(name, sha, _git(repository, "show", "--no-patch", "--format=%s", sha), folder))
        yield commits


def uncommitted(repository: Path = ROOT) -> bool:
    """Return whether there are changes without a commit."""
    return bool(_git(repository, "status", "--porcelain", "--untracked-files=no"))


def _git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


# --- arms that take turns, so that what drifts on the machine meets both alike ---------------------------------------

AnyArm = TypeVar("AnyArm")
Figures = Mapping[str, float]  # costs: less is better
Step = Callable[[AnyArm, int], Figures]
"""Measures something of an arm; both arms of a pair get the same number, and no other pair does."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of both arms: medians, and the median of new / old over the pairs with its 95 % interval.

    The interval has no ends where there are fewer pairs than it takes.
    """

    old: float
    new: float
    ratio: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def verdict(self) -> str:
        """Return the direction of the difference, if the interval leaves no doubt about it."""
        if self.low is None or self.high is None:
            return "too few pairs"
        return "more" if self.low > 1 else "less" if self.high < 1 else "no difference seen"


@dataclass
class Pairs:
    """The measurements so far, by figure: pairs of old and new, taken one right after the other."""

    taken: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, old: Figures, new: Figures) -> None:
        """Add both arms' figures. Figures that one of them lacks are left out."""
        for name in old.keys() & new.keys():
            self.taken.setdefault(name, []).append((old[name], new[name]))

    def compared(self) -> dict[str, Comparison]:
        return {name: _comparison(pairs) for name, pairs in self.taken.items()}


def _comparison(pairs: Sequence[tuple[float, float]]) -> Comparison:
    old, new = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratios = [after / before for before, after in pairs]
    least, most = median_interval(ratios)
    return Comparison(old, new, statistics.median(ratios), least, most, len(pairs))


def take_turns(old: AnyArm, new: AnyArm, steps: Mapping[str, Step[AnyArm]], turn: int, pairs: Pairs) -> None:
    """Run one round: every step four times, old, new, new, old, and reversed in every second round.

    Args:
        turn: number of the round, from 0.
    """
    order = (old, new, new, old) if turn % 2 == 0 else (new, old, old, new)
    for step in steps.values():
        for half in (0, 1):
            first, second = order[2 * half : 2 * half + 2]
            number = 2 * turn + half
            figures = step(first, number), step(second, number)
            pairs.add(*(figures if first is old else figures[::-1]))


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """A commit with a running server."""

    commit: Commit
    server: Server


def add_options(parser: argparse.ArgumentParser) -> None:
    servers.add_options(parser)
    parser.add_argument("--old", default="HEAD~1", help="commit, branch or tag that is the measure; default HEAD~1")
    parser.add_argument("--new", default="HEAD", help="the other one; default HEAD")
    parser.add_argument("--seconds", type=float, default=180.0, help="for all rounds; there are at least three")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer when tokens are timed")
    parser.add_argument("--long", type=int, default=4000, help="tokens of the long prompt; figures keep their names")


def run(options: argparse.Namespace) -> dict[str, Any]:
    if uncommitted() and options.new == "HEAD":
        print("note: what is not committed is not measured", file=sys.stderr)
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: other programs keep this machine busy (load {load:.1f}): figures will scatter", file=sys.stderr)
    begun = time.monotonic()
    with (
        checked_out({"old": options.old, "new": options.new}) as (old, new),
        servers.copies(options) as copies,
    ):
        for commit in (old, new):
            commit.check()
        pairs, rounds = measured(old, new, copies, options)
    compared = pairs.compared()
    shown(old, new, compared)
    return report(old, new, compared, rounds, time.monotonic() - begun, load)


def measured(old: Commit, new: Commit, copies: Copies, options: argparse.Namespace) -> tuple[Pairs, int]:
    """Run rounds until the time is over. The first start of each commit does not count."""
    with both_serving(old, new, copies, 0) as (first, _):
        text = Text(0)
        text.calibrate(first.server)
    pairs, turn, until = Pairs(), 0, time.monotonic() + options.seconds
    took = 0.0
    while turn < LEAST or time.monotonic() + took < until:
        begun = time.monotonic()
        with both_serving(old, new, copies, turn) as arms:
            take_turns(*arms, steps_of(text, options), turn, pairs)
            pairs.add(*(held(arm) for arm in arms))
        took = time.monotonic() - begun
        turn += 1
        print(f"round {turn}: {took:.0f} s", file=sys.stderr, flush=True)
    return pairs, turn


@contextmanager
def both_serving(old: Commit, new: Commit, copies: Copies, turn: int) -> Iterator[tuple[Arm, Arm]]:
    """Start the old and the new server. In every second round the new one starts first."""
    with ExitStack() as stack:
        order = (old, new) if turn % 2 == 0 else (new, old)
        arms = {commit.name: Arm(commit, stack.enter_context(serving(commit, copies))) for commit in order}
        yield arms[old.name], arms[new.name]


def serving(commit: Commit, copies: Copies) -> AbstractContextManager[Server]:
    models = ("--target", str(copies.target), "--draft", str(copies.draft), "--dtype", "float32")
    command = commit.command("-m", "mlx_specprefill_server", "serve", *models, *OPTIONS)
    costs = str(copies.folder / f"costs-{commit.name}.json")
    environment = {
        "MLX_SPECPREFILL_CALIBRATION_FILE": costs,
        "MLX_SPECPREFILL_REMEMBER": "false",
        "MLX_SPECPREFILL_DENSIFY": "off",  # nothing goes on while the other arm is measured
    }
    return copies.serve(commit.name, command, **environment, **commit.environment)


# --- what is measured ------------------------------------------------------------------------------------------------


def steps_of(text: Text, options: argparse.Namespace) -> dict[str, Step[Arm]]:
    """Return every step by name. The prompt of a number is the same for both arms."""
    return {
        "import": lambda arm, _: imported(arm.commit),
        "short": lambda arm, number: first_token(arm.server, text.fresh(number, "short"), SHORT, "sparse_1k_ms"),
        "long": lambda arm, number: first_token(arm.server, text.fresh(number, "long"), options.long, "sparse_4k_ms"),
        "full": lambda arm, number: full(arm.server, text.fresh(number, "full"), options.long),
        "session": lambda arm, number: second_turn(arm.server, text.fresh(number, "session")),
        "alone": lambda arm, number: alone(arm.server, text.fresh(number, "alone"), options.tokens),
        "streams": lambda arm, number: streams(arm.server, text.fresh(number, "streams"), options.tokens),
    }


def imported(commit: Commit) -> Figures:
    environment = {**os.environ, **commit.environment}
    begun = time.perf_counter()
    command = commit.command("-m", "mlx_specprefill_server", "--version")
    subprocess.run(command, env=environment, cwd=commit.folder, stdout=subprocess.DEVNULL, check=True)
    return {"import_ms": 1e3 * (time.perf_counter() - begun)}


def first_token(server: Server, text: Text, length: int, name: str) -> Figures:
    reply = server.ask(user(text.of(length)), 2, **SPARSE)
    first_ms, times = 1e3 * reply.first_s, reply.report.get("timings", {})
    if name != "sparse_4k_ms" or not {"draft_ms", "prefill_ms"} <= times.keys():
        return {name: first_ms}
    return {name: first_ms, "rest_ms": first_ms - times["draft_ms"] - times["prefill_ms"]}


def full(server: Server, text: Text, length: int) -> Figures:
    return {"full_4k_ms": 1e3 * server.ask(user(text.of(length)), 2, **DENSE).first_s}


def second_turn(server: Server, text: Text) -> Figures:
    messages = user(text.of(SESSION))
    first = server.ask(messages, 8, **SPARSE)
    return {"second_turn_ms": 1e3 * server.ask(following(messages, first, text.of(30)), 2, **SPARSE).first_s}


def alone(server: Server, text: Text, tokens: int) -> Figures:
    reply = server.ask(user(text.of(40)), tokens, **DENSE)
    return {"decode_1_ms": 1e3 * (reply.total_s - reply.first_s) / max(1, reply.completion_tokens - 1)}


def streams(server: Server, text: Text, tokens: int) -> Figures:
    prompts = [user(text.of(40)) for _ in range(STREAMS)]
    used, loop, begun = server.cpu_s(), server.loop_s(), time.perf_counter()
    replies = together(lambda prompt: server.ask(prompt, tokens, **DENSE), prompts)
    seconds, used, loop = time.perf_counter() - begun, server.cpu_s() - used, server.loop_s() - loop
    written = sum(reply.completion_tokens for reply in replies)
    spent = {"cpu_per_token_ms": 1e3 * used / written, "loop_per_token_us": 1e6 * loop / written}
    return {"decode_8_ms": 1e3 * seconds / written} | {name: value for name, value in spent.items() if value > 0}


def held(arm: Arm) -> Figures:
    """Return the largest memory use so far, or the current one where the system does not report it."""
    return {"peak_mib": servers.peak_bytes(arm.server.pid) / 2**20}


# --- the report ------------------------------------------------------------------------------------------------------


def shown(old: Commit, new: Commit, compared: dict[str, Comparison]) -> None:
    rows = [
        (name, one.old, one.new, one.ratio, one.low, one.high, one.pairs, one.verdict) for name, one in compared.items()
    ]
    title = f"old {old.sha[:12]} {old.title}\nnew {new.sha[:12]} {new.title}"
    show(("figure", "old", "new", "new / old", "from", "to", "pairs", "the new one costs"), rows, title)


def report(
    old: Commit, new: Commit, compared: dict[str, Comparison], rounds: int, seconds: float, load: float
) -> dict[str, Any]:
    described = {commit.name: {"commit": commit.sha, "title": commit.title} for commit in (old, new)}
    figures = {name: {**asdict(one), "verdict": one.verdict} for name, one in compared.items()}
    named = {word: [name for name, one in compared.items() if one.verdict == word] for word in ("more", "less")}
    times = {"rounds": rounds, "seconds": seconds, "load": load}
    found: dict[str, Any] = rounded(
        {"benchmark": "guard", **machine(), **described, **times, **named, "figures": figures}
    )
    return found
