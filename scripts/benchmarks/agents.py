"""Sessions of coding agents: what a whole session waits, beside the same server in full and `mlx_lm.server`.

    growth        fifteen turns: files, searches, edits, test logs, and questions about facts in them
    short         eight turns, for small contexts: results of 1000 to 1750 tokens where it grows to 7000
    compaction    as growth, begun anew from a summary in the middle
    side by side  two agents with system texts of their own at the same time

Arms: ours as the pair configures it, ours with every request in full (its prefix cache as always), and `mlx_lm.server`
with its prompt cache. All get the same float32 copy of the checkpoint, with a template that knows tools, the same text
(our own, in the shape of recorded sessions) and the same BLAS. In each repetition they take turns; one begins when the
one before it has come to rest. What a model answers goes into its conversation, as with an agent; calls are scripted.

Per kind of session and arm, medians over the repetitions: the sum and the worst of the times to first token, tokens
that target and draft have read, prompt tokens from a cache, and facts answered rightly, in the session and behind its
end. Then a second session begins in the same repository, and a third one right after `POST /v1/specprefill/warm`.

With `--shape` the weights are random and answers empty; a draft of two layers costs about a sixth of a target of nine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .harness import BenchError, pairs, servers, shapes
from .harness.agent_sessions import KINDS, TEMPLATE, Count, Message, Session, Shape, Step, make_session
from .harness.figures import machine, rounded, show_rows
from .harness.servers import DENSE, Copies, Server, together
from .harness.text import user

QUICK = {"sessions": ["short"], "tokens": 7000, "repeats": 2}
USUAL = ["growth", "compaction", "side by side"]
OURS, FULL, PEER = "ours", "ours, full", "mlx_lm.server"
LONG = 512  # tokens: what brings fewer new ones is not worth choosing from
ANSWER, REMARK = 24, 8  # tokens of an answer at most, to a question and otherwise


@dataclass(frozen=True)
class Arm:
    """A server and how it is asked."""

    name: str
    server: Server
    options: dict[str, Any]


@dataclass
class Turn:
    """One request. Tokens; `new` are those that neither the agent's beginning nor an earlier turn had."""

    first_s: float
    total_s: float
    prompt: int
    cached: int
    target: int
    draft: int
    new: int
    sparse: bool
    continuation: str | None
    draft_s: float
    target_s: float
    right: bool | None

    def counts(self) -> bool:
        """Whether it brings enough that is new to be prefilled sparsely."""
        return self.new >= LONG


@dataclass
class Played:
    """What one arm made of one kind of session, once. `after` are the questions behind its end."""

    turns: list[Turn]
    after: list[Turn]
    second_s: float
    warm_s: float | None = None
    wall_s: float = 0.0

    def figures(self) -> dict[str, float]:
        asked = [turn.right for turn in (*self.turns, *self.after) if turn.right is not None]
        return {
            "sum_s": sum(turn.first_s for turn in self.turns),
            "worst_s": max(turn.first_s for turn in self.turns),
            "wall_s": self.wall_s,
            "prompt_tokens": sum(turn.prompt for turn in self.turns),
            "cached_tokens": sum(turn.cached for turn in self.turns),
            "target_tokens": sum(turn.target for turn in self.turns),
            "draft_tokens": sum(turn.draft for turn in self.turns),
            "cache_hits": sum(2 * turn.cached >= turn.prompt for turn in self.turns),
            "sparse_turns": sum(turn.sparse for turn in self.turns),
            "asked": len(asked),
            "right": sum(asked),
            "second_s": self.second_s,
        } | ({} if self.warm_s is None else {"warm_s": self.warm_s})


@dataclass
class Conversation:
    """One session as its client keeps it."""

    arm: Arm
    session: Session
    history: list[Message] = field(init=False)
    known: int = field(init=False)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.history = [{"role": "system", "content": self.session.system}]
        self.known = self.session.opening

    def take(self, step: Step) -> Turn:
        """Send what the step says and keep the answer."""
        if step.fresh:
            self._begin()
        self.history += step.messages(len(self.history))
        tokens = ANSWER if step.code else REMARK
        reply = self.arm.server.ask(self.history, tokens, tools=self.session.tools, **self.arm.options)
        self.history.append({"role": "assistant", "content": reply.text})
        report, cached = reply.report, reply.cached_tokens
        times = report.get("timings", {})
        seen, self.known = self.known, reply.prompt_tokens + reply.completion_tokens
        return Turn(
            first_s=reply.first_s or reply.total_s,  # an answer may have no text
            total_s=reply.total_s,
            prompt=reply.prompt_tokens,
            cached=cached,
            target=report.get("kept_tokens", reply.prompt_tokens) - report.get("cached_tokens", cached),
            draft=report.get("draft_tokens", 0),
            new=reply.prompt_tokens - seen,
            sparse=report.get("mode") == "sparse",
            continuation=report.get("continuation"),
            draft_s=times.get("draft_ms", 0.0) / 1e3,
            target_s=times.get("prefill_ms", 0.0) / 1e3,
            right=step.code in reply.text if step.code else None,
        )


# --- one kind of session ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kit:
    """The texts of one repetition: sessions that run at once, and those that begin in the same repository later."""

    sessions: list[Session]
    second: Session
    third: Session

    @classmethod
    def of(cls, shape: Shape, tokens: int, seed: str, count: Count) -> Kit:
        first, *_ = sessions = [make_session(shape, tokens, f"{seed}/{n}", count) for n in range(shape.agents)]
        later = (first.again(make_session(shape, tokens, f"{seed}/{name}", count)) for name in ("second", "third"))
        return cls(sessions, *later)


def play(arm: Arm, kit: Kit, pause: float) -> Played:
    begun = time.perf_counter()
    talks = [Conversation(arm, session) for session in kit.sessions]
    turns = [turn for part in together(lambda talk: worked(talk, pause), talks) for turn in part]
    wall_s = time.perf_counter() - begun
    after = [talk.take(step) for talk in talks for step in talk.session.after]
    second = Conversation(arm, kit.second).take(kit.second.steps[0])
    played = Played(turns, after, second.first_s, wall_s=wall_s)
    arm.server.rest()
    if arm.name != PEER:
        third = Conversation(arm, kit.third)
        arm.server.warm(third.history, tools=kit.third.tools)
        played.warm_s = third.take(kit.third.steps[0]).first_s
        arm.server.rest()
    return played


def worked(talk: Conversation, pause: float) -> list[Turn]:
    """All turns of a session; `pause` seconds are what the agent's tools take."""
    turns = []
    for step in talk.session.steps:
        turns.append(talk.take(step))
        time.sleep(pause)
    return turns


# --- what follows from the figures -----------------------------------------------------------------------------------


Results = dict[str, dict[str, list[Played]]]  # by kind of session, then by arm, one per repetition


def rows(results: Results) -> list[dict[str, Any]]:
    """Medians over the repetitions, but for counts of answers: sums."""
    table = []
    for kind, arms in results.items():
        for arm, plays in arms.items():
            figures = [played.figures() for played in plays]
            row = {name: statistics.median(one[name] for one in figures) for name in figures[0]}
            row |= {name: sum(one[name] for one in figures) for name in ("asked", "right")}
            table.append({"session": kind, "arm": arm, **row})
    return table


def ratio(arms: dict[str, list[Played]], other: str, figure: str) -> float | None:
    """The median of ours over another arm's; None where that did not take part."""
    if other not in arms:
        return None
    pairs_of = zip(arms[OURS], arms[other], strict=True)
    return statistics.median(mine.figures()[figure] / its.figures()[figure] for mine, its in pairs_of)


def sparse_share(plays: Sequence[Played]) -> float | None:
    """Of the tokens that were new and many, those in turns that were prefilled sparsely."""
    new = [turn for played in plays for turn in played.turns if turn.counts()]
    total = sum(turn.new for turn in new)
    return sum(turn.new for turn in new if turn.sparse) / total if total else None


def right_share(plays: Sequence[Played]) -> float:
    """Of the facts that were asked for."""
    figures = [played.figures() for played in plays]
    return sum(one["right"] for one in figures) / sum(one["asked"] for one in figures)


def all_of(results: Results, arm: str) -> list[Played]:
    """Of all kinds of sessions."""
    return [played for kind in results.values() for played in kind[arm]]


def summary(results: Results, options: argparse.Namespace) -> dict[str, Any]:
    """The headline is that of the first kind of session."""
    arms = next(iter(results.values()))
    ours = arms[OURS]
    return {
        "benchmark": "agents",
        **machine(),
        "tokens": options.tokens,
        "repeats": options.repeats,
        "sum_vs_dense": ratio(arms, FULL, "sum_s"),
        "sum_vs_mlx_lm": ratio(arms, PEER, "sum_s"),
        "worst_vs_dense": ratio(arms, FULL, "worst_s"),
        "second_session_first_vs_warm": statistics.median(
            played.second_s / played.warm_s for played in ours if played.warm_s
        ),
        "sparse_share_of_new": sparse_share(ours),
        "right": None if options.shape else {arm: right_share(all_of(results, arm)) for arm in arms},
        "rows": rows(results),
        "turns": {arm: [asdict(turn) for turn in plays[0].turns] for arm, plays in arms.items()},
    }


# --- start -----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    servers.add_options(parser)
    parser.add_argument("--sessions", nargs="+", choices=list(KINDS), default=USUAL)
    parser.add_argument("--tokens", type=int, default=14000, help="to which a session grows")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that the agent's tools take after each turn")
    parser.add_argument("--seed", type=int, default=0)
    shapes.add_options(parser, None, layers=9, draft_layers=2, narrow=8)
    parser.add_argument("--alone", action="store_true", help="without mlx_lm.server")


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.tokens < 1000 or options.repeats < 1:
        raise BenchError("--tokens must be at least 1000 and --repeats at least 1")
    with ExitStack() as stack:
        copies = stack.enter_context(checkpoints(options))
        arms = start(copies, stack, options)
        results = measured(arms, counter(copies), options)
    report = rounded(summary(results, options))
    show_rows(report["rows"])
    return report


@contextmanager
def checkpoints(options: argparse.Namespace) -> Iterator[Copies]:
    """The pair, or random weights, until the block ends."""
    if options.shape is None:
        with servers.copies(options, TEMPLATE) as copies:
            yield copies
        return
    tokenizer, _ = pairs.checkpoints(options)
    with tempfile.TemporaryDirectory() as name:
        sides = (
            shapes.save_random(options, side, tokenizer, Path(name, side), TEMPLATE) for side in ("target", "draft")
        )
        yield Copies(*sides, Path(name), options.start_s)


def start(copies: Copies, stack: ExitStack, options: argparse.Namespace) -> list[Arm]:
    """A process for each arm: what one has read is of no use to the others."""
    given = pairs.defaults(options) if options.shape is None else ()
    # Without pauses nothing is read in idle time but behind the last turn, where an arm is only waited for.
    idle = {"MLX_SPECPREFILL_DENSIFY": "on" if options.pause else "off"}
    arms = [
        Arm(OURS, stack.enter_context(copies.ours(*given, MLX_SPECPREFILL_REMEMBER="true", **idle)), {}),
        Arm(FULL, stack.enter_context(copies.ours(*given, **idle)), DENSE),
    ]
    if not options.alone:
        arms.append(Arm(PEER, stack.enter_context(copies.mlx_lm()), {}))
    for arm in arms:  # compiles and loads
        arm.server.ask(user("Hello"), 4, **arm.options)
    return arms


def counter(copies: Copies) -> Callable[[str], int]:
    """Tokens of a text."""
    tokenizer = Tokenizer.from_file(str(copies.target / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def measured(arms: list[Arm], count: Count, options: argparse.Namespace) -> Results:
    """All arms in turn, one after the other first: what disturbs the machine disturbs all of them."""
    results: Results = {kind: {arm.name: [] for arm in arms} for kind in options.sessions}
    for repeat in range(options.repeats):
        first = repeat % len(arms)
        for kind in options.sessions:
            kit = Kit.of(KINDS[kind], options.tokens, f"{options.seed}/{repeat}/{kind}", count)
            for arm in (*arms[first:], *arms[:first]):
                played = play(arm, kit, options.pause)
                results[kind][arm.name].append(played)
                total = played.figures()["sum_s"]
                print(
                    f"{kind}, {repeat + 1} of {options.repeats}, {arm.name}: {total:.1f} s", file=sys.stderr, flush=True
                )
    return results
