"""Sessions of coding agents: what a whole session waits, beside the same server in full and `mlx_lm.server`.

    growth        fifteen turns: files, searches, edits, test logs, and questions about facts in them
    long results  results with the sizes of recorded ones: a median of 256 tokens, most tokens in those above 2048
    document      ten questions in a row about one document

Arms: ours as the pair configures it, ours with every request in full (its prefix cache as always), and `mlx_lm.server`
and, if `--vllm-mlx` names its executable, `vllm-mlx` with their prompt caches. All get the same float32 copy of the
checkpoint, with a template that knows tools, the same text (our own, in the shape of recorded sessions) and the same
BLAS. In each repetition they take turns; one begins when the one before it has come to rest. What a model answers goes
into its conversation, as with an agent; calls are scripted.

Behind its end a session's last turn is sent once more. Each fact that it did not ask for is asked for behind that end.
Then the server is started again, with the same folder for its prefix cache, and the last turn is sent a third time.

Rows: sums over the repetitions for each kind of session and arm; tokens that target and draft have read. Bars: ours
against the same turns in full; lost are facts that only full knew. Wrong: each fact that ours got wrong, how many turns
ago it was said, and if the target had not read all of what that turn brought.

With `--tools` nothing of this is measured but an agent's first prompt with so many tools, as MCP servers have them: all
in front, or deferred (`defer_loading`) until a search finds them. Then one has been found. The server counts the
tokens; no model reads them. The bar is the deferred prompt against the whole.

With `--edits` what was sent is edited before every fifth turn: a tool whose server answered late stands among the
others, or an early result has new lines in its middle. A third arm is ours without reuse behind an edit
(`MLX_SPECPREFILL_REUSE=off`); the bars are ours against it, over all turns and over those with an edit.

With `--compaction` a session is asked for its summary behind its last turn, once as the session was read and once with
all of it read in full. The bars are what that waits and reads.

With `--soak` it is one session of 80 turns and 60 000 tokens on the scripted model of the tests, and its cached tokens
are counted: with a start of the server in the middle, a compaction, and eight sub-agents behind one prefix.

With `--shape` the weights are random and answers empty; a draft of two layers costs about a sixth of a target of nine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .harness import BenchError, pairs, servers, shapes
from .harness.agent_edits import Edit, make_edits
from .harness.agent_sessions import KINDS, TEMPLATE, Count, Message, Session, Step, make_session
from .harness.agent_tools import FINDER, mcp_tools
from .harness.figures import machine, rounded, show_rows
from .harness.servers import DENSE, Copies, Server
from .harness.soak import COMPACT, soak
from .harness.text import user

QUICK = {"sessions": ["growth"], "repeats": 1}
OURS, FULL, PEER = "ours", "ours, full", "mlx_lm.server"
NO_REUSE = "ours, no reuse"
EDIT_EVERY = 5  # turns
ANSWER, REMARK = 24, 8  # tokens of an answer at most, to a question and otherwise
TAIL = 32  # tokens: an answer and the template around it, which the next turn may have to read again


@dataclass
class Arm:
    """A server and the options of its requests."""

    name: str
    make: Callable[[], AbstractContextManager[Server]]
    options: dict[str, Any]
    running: ExitStack

    def start(self) -> None:
        """Start the server. Stop it first if it runs."""
        self.running.close()
        self.server = self.running.enter_context(self.make())
        self.server.ask(user("Hello"), 4, **self.options)  # compiles and loads


@dataclass
class Turn:
    """One request. All sizes but the time to the first token are in tokens.

    Attributes:
        target: read by it, with those of earlier text that it recalled.
        new: those that neither the agent's beginning nor an earlier turn had.
        right: the answer holds the fact; None: nothing was asked.
        back: how many turns ago the fact was said.
        thinned: the target had not read all of what the turn of the fact brought.
        edited: earlier text was edited before it.
        reused: kept as they were read before an edit in front of them.
    """

    first_s: float
    cached: int
    target: int
    draft: int
    recalled: int
    new: int
    right: bool | None = None
    back: int = 0
    thinned: bool = False
    edited: bool = False
    reused: int = 0

    def exceeds(self, full: Turn) -> bool:
        """True if the target read more than in full, without recalled tokens and the length of answers."""
        return self.target - self.recalled - self.new > full.target - full.new + TAIL


@dataclass
class Played:
    """The turns of one arm in one kind of session.

    Attributes:
        after: questions, each right behind its end.
        retries: the last turn sent again, at once and, in our arms, after a start of the server.
    """

    turns: list[Turn]
    after: list[Turn]
    retries: list[Turn]

    def restarts(self) -> int:
        """Return the number of requests that did not continue from the target's cache of the turn before."""
        follow = (*pairwise(self.turns), *((self.turns[-1], turn) for turn in self.after))
        return sum(turn.cached < before.cached + before.target - TAIL for before, turn in follow)

    def asked(self) -> list[Turn]:
        return [turn for turn in (*self.turns, *self.after) if turn.right is not None]


class Conversation:
    """One session from the side of its client."""

    def __init__(self, arm: Arm, session: Session, edits: Sequence[Edit] = ()) -> None:
        self.arm, self.session, self.known = arm, session, session.opening
        self.tools, self.edits = session.tools, edits
        self.history: list[Message] = [{"role": "system", "content": session.system}]
        self.turns: list[Turn] = []

    def take(self, step: Step) -> Turn:
        """Send the step's message and keep the answer."""
        number, rest = divmod(len(self.turns), EDIT_EVERY)
        edited = rest == 0 and 0 < number <= len(self.edits)
        if edited:
            self.history, self.tools = self.edits[number - 1].apply(self.history, self.tools)
        self.history += step.messages(len(self.history))
        self.sent = [*self.history], ANSWER if step.code else REMARK
        turn, text, self.known = self.send(*self.sent)
        turn.edited = edited
        self.history.append({"role": "assistant", "content": text})
        if step.code:
            told = self.turns[step.told] if step.told < len(self.turns) else turn
            turn.right, turn.back = step.code in text, len(self.turns) - step.told
            turn.thinned = told.target < told.new
        self.turns.append(turn)
        return turn

    def send(self, messages: list[Message], tokens: int) -> tuple[Turn, str, int]:
        """Return the turn, the answer, and the tokens of both."""
        tools = {"tools": self.tools} if self.tools else {}
        reply = self.arm.server.ask(messages, tokens, **tools, **self.arm.options)
        report, prompt = reply.report, reply.prompt_tokens
        cached = report.get("cached_tokens", reply.cached_tokens)
        turn = Turn(
            first_s=reply.first_s or reply.total_s,  # an answer may have no text
            cached=cached,
            target=report.get("read_tokens", report.get("kept_tokens", prompt) - cached),
            draft=report.get("draft_tokens", 0),
            recalled=report.get("recalled_tokens", 0),
            new=prompt - self.known,
            reused=report.get("reused_tokens", 0),
        )
        return turn, reply.text, prompt + reply.completion_tokens


# --- one kind of session ---------------------------------------------------------------------------------------------


def play(arm: Arm, session: Session, pause: float, edits: Sequence[Edit] = ()) -> Played:
    """Send a whole session. `pause` is the time of the agent's tools in seconds."""
    talk = Conversation(arm, session, edits)
    for step in session.steps:
        talk.take(step)
        time.sleep(pause)
    played, last, end = Played([*talk.turns], [], []), talk.sent, len(talk.history)
    played.retries.append(talk.send(*last)[0])
    for step in session.after:
        played.after.append(talk.take(step))
        del talk.history[end:], talk.turns[len(session.steps) :]
    arm.server.rest()
    if arm.name in (OURS, FULL, NO_REUSE):
        arm.start()
        played.retries.append(talk.send(*last)[0])
        arm.server.rest()
    return played


# --- what follows from the figures -----------------------------------------------------------------------------------


Results = dict[str, dict[str, list[Played]]]  # by kind of session, then by arm, one per repetition


def row(kind: str, arm: str, plays: Sequence[Played]) -> dict[str, Any]:
    """Return the sums over the repetitions."""
    turns = [turn for played in plays for turn in played.turns]
    asked = [turn for played in plays for turn in played.asked()]
    sent = zip(*((played.turns[-1], *played.retries) for played in plays), strict=True)
    return {
        "session": kind,
        "arm": arm,
        "sum_s": sum(turn.first_s for turn in turns),
        "worst_s": max(turn.first_s for turn in turns),
        "target": sum(turn.target for turn in turns),
        "draft": sum(turn.draft for turn in turns),
        "recalled": sum(turn.recalled for turn in turns),
        "restarts": sum(played.restarts() for played in plays),
        "second_draft": sum(played.turns[1].draft for played in plays),
        "second_new": sum(played.turns[1].new for played in plays),
        "asked": len(asked),
        "right": sum(bool(turn.right) for turn in asked),
        "reused": sum(turn.reused for turn in turns),
    } | {
        name + unit: sum(getattr(turn, figure) for turn in times)
        for name, times in zip(("last", "retry", "restarted"), sent, strict=False)
        for unit, figure in (("_s", "first_s"), ("_target", "target"))
    }


def bars(kind: str, rows: dict[str, dict[str, Any]], arms: dict[str, list[Played]]) -> dict[str, Any]:
    """Return the bars for our arm against the same turns in full."""
    ours, full = rows[OURS], rows[FULL]
    pairs_of = zip(arms[OURS], arms[FULL], strict=True)
    turns = [both for mine, its in pairs_of for both in zip(mine.turns, its.turns, strict=True)]
    return {
        "session": kind,
        "target_vs_full": ours["target"] / full["target"],
        "sum_vs_full": ours["sum_s"] / full["sum_s"],
        "sum_vs_mlx_lm": ours["sum_s"] / rows[PEER]["sum_s"] if PEER in rows else None,
        "worst_turn_vs_full": max(mine.first_s / its.first_s for mine, its in turns),
        "turns_above_full": sum(mine.exceeds(its) for mine, its in turns),
        "recalled_share": ours["recalled"] / ours["target"],
        "second_draft_vs_new": ours["second_draft"] / ours["second_new"],
        "right_vs_full": ours["right"] / full["right"] if full["right"] else None,
        "lost": sum(bool(one["right_full"]) for one in wrong(kind, arms[OURS], arms[FULL])),
        "retry_vs_first": ours["retry_s"] / ours["last_s"],
        "restarted_vs_first": ours["restarted_s"] / ours["last_s"],
    }


def edit_bars(kind: str, arms: dict[str, list[Played]]) -> dict[str, Any]:
    """Return the bars for our arm against the same turns without reuse."""

    def waited(arm: str, edited: bool) -> float:
        turns = (turn for played in arms[arm] for turn in played.turns)
        return sum(turn.first_s for turn in turns if turn.edited or not edited)

    def right(arm: str) -> int:
        return sum(bool(turn.right) for played in arms[arm] for turn in played.asked())

    return {
        "session": kind,
        "sum_vs_no_reuse": waited(OURS, False) / waited(NO_REUSE, False),
        "edited_vs_no_reuse": waited(OURS, True) / waited(NO_REUSE, True),
        "right": right(OURS),
        "right_no_reuse": right(NO_REUSE),
    }


def wrong(kind: str, ours: Sequence[Played], full: Sequence[Played]) -> list[dict[str, Any]]:
    """Return the facts that our arm got wrong."""
    names = ("back", "thinned", "recalled")
    return [
        {"session": kind, "repeat": repeat, **{name: getattr(mine, name) for name in names}, "right_full": its.right}
        for repeat, plays in enumerate(zip(ours, full, strict=True))
        for mine, its in zip(*(played.asked() for played in plays), strict=True)
        if not mine.right
    ]


def summary(results: Results, options: argparse.Namespace) -> dict[str, Any]:
    rows = {kind: {arm: row(kind, arm, plays) for arm, plays in arms.items()} for kind, arms in results.items()}
    return {
        "benchmark": "agents",
        **machine(),
        "tokens": options.tokens,
        "repeats": options.repeats,
        "rows": [one for arms in rows.values() for one in arms.values()],
        "bars": [bars(kind, rows[kind], arms) for kind, arms in results.items()],
        "edits": [edit_bars(kind, arms) for kind, arms in results.items() if NO_REUSE in arms],
        "wrong": [one for kind, arms in results.items() for one in wrong(kind, arms[OURS], arms[FULL])],
        "turns": {
            f"{kind}, {arm}": [asdict(turn) for turn in plays[0].turns]
            for kind, arms in results.items()
            for arm, plays in arms.items()
        },
    }


# --- an agent's first prompt ------------------------------------------------------------------------------------------


def first_prompts(server: Server, count: Count, options: argparse.Namespace) -> dict[str, Any]:
    """Return the tokens of an agent's first prompts with tools in front, deferred, and behind the first search."""
    functions = mcp_tools(options.tools, 300, str(options.seed), count)
    tools = [{"type": "function", "function": function} for function in functions]
    finder, deferred = {"type": "function", "function": FINDER}, [{**tool, "defer_loading": True} for tool in tools]
    begun = make_session(KINDS["growth"], options.tokens, f"{options.seed}/tools", count)
    messages = [{"role": "system", "content": begun.system}, *user("What is open in the tracker?")]
    call = {"id": "c", "type": "function", "function": {"name": FINDER["name"], "arguments": '{"query": "tracker"}'}}
    found = {"type": "tool_reference", "tool_name": functions[0]["name"]}
    loaded: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [found]},
    ]
    sent: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
        "in front": (messages, [finder, *tools]),
        "deferred": (messages, [finder, *deferred]),
        "one loaded": ([*messages, *loaded], [finder, *deferred]),
        "that one alone": ([*messages, *loaded], [finder, deferred[0]]),
    }
    rows = [{"tools": name, "prompt": server.count(told, given)} for name, (told, given) in sent.items()]
    prompts = {row["tools"]: row["prompt"] for row in rows}
    return {
        "benchmark": "agents",
        **machine(),
        "tools": options.tools,
        "rows": rows,
        "deferred_vs_in_front": prompts["deferred"] / prompts["in front"],
        "tokens_a_schema": (prompts["in front"] - prompts["deferred"]) / options.tools,
    }


# --- a session's summary ----------------------------------------------------------------------------------------------


def summaries(arm: Arm, count: Count, options: argparse.Namespace) -> dict[str, Any]:
    """Return what the request for a summary reads and waits behind sessions as they were read, and beside that."""
    rows = []
    for repeat in range(options.repeats):
        session = make_session(KINDS["growth"], options.tokens, f"{options.seed}/{repeat}/summary", count)
        talk = Conversation(arm, session)
        for step in session.steps:
            talk.take(step)
        arm.server.rest()
        anew = Conversation(copy(arm), session)
        anew.arm.name, anew.arm.options = FULL, DENSE | {"cache_salt": f"anew {repeat}"}
        asked = [*talk.history, *user(COMPACT)]
        turns = {one.arm.name: one.send(asked, REMARK)[0] for one in ((talk, anew), (anew, talk))[repeat % 2]}
        rows += [{"repeat": repeat, "arm": name, **asdict(turn)} for name, turn in turns.items()]
    ours, full = ([row for row in rows if row["arm"] == name] for name in (OURS, FULL))
    bars = {
        f"{key}_vs_full": [one[key] / other[key] for one, other in zip(ours, full, strict=True)]
        for key in ("first_s", "target", "draft")
        if all(other[key] for other in full)
    }
    columns = ("repeat", "arm", "first_s", "cached", "target", "draft", "recalled")
    return {"benchmark": "agents", **machine(), "rows": [{key: row[key] for key in columns} for row in rows], **bars}


# --- start -----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    servers.add_options(parser)
    parser.add_argument("--sessions", nargs="+", choices=list(KINDS), default=["growth", "long results"])
    parser.add_argument("--tokens", type=int, default=7000, help="to which a session grows")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that the agent's tools take after each turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--edits", action="store_true", help="edit earlier text before every fifth turn")
    shapes.add_options(parser, None, layers=9, draft_layers=2, narrow=8)
    parser.add_argument("--tools", type=int, help="count an agent's first prompt with so many tools; nothing else")
    parser.add_argument("--compaction", action="store_true", help="ask for a session's summary; nothing else")
    parser.add_argument("--soak", action="store_true", help="count what one long session reads again; nothing else")
    parser.add_argument("--alone", action="store_true", help="without mlx_lm.server")
    parser.add_argument("--vllm-mlx", type=Path, help="the executable of vllm-mlx, in an environment of its own")


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.tokens < 1000 or options.repeats < 1:
        raise BenchError("--tokens must be at least 1000 and --repeats at least 1")
    if options.soak:
        report = {"benchmark": "agents", **machine(), **soak(options.start_s, 80, 60_000, 8, 5000)}
        show_rows([report])
        return rounded(report)
    with ExitStack() as stack:
        copies = stack.enter_context(checkpoints(options))
        if options.tools or options.compaction:
            if options.tools:
                report = first_prompts(stack.enter_context(copies.ours()), counter(copies), options)
            else:
                report = summaries(start(copies, stack, options, [OURS])[0], counter(copies), options)
            show_rows(report["rows"])
            return rounded(report)
        arms = start(copies, stack, options)
        results = measured(arms, counter(copies), options)
    report = rounded(summary(results, options))
    for table in (report["rows"], report["bars"], report["edits"], report["wrong"]):
        show_rows(table)
    return report


@contextmanager
def checkpoints(options: argparse.Namespace) -> Iterator[Copies]:
    """Yield the pair, or random weights, until the block ends."""
    if options.shape is None:
        with servers.copies(options, TEMPLATE) as copies:
            yield copies
        return
    tokenizer, _ = pairs.checkpoints(options)
    with tempfile.TemporaryDirectory() as name:
        target, draft = (
            shapes.save_random(options, side, tokenizer, Path(name, side), TEMPLATE) for side in ("target", "draft")
        )
        yield Copies(target, draft, Path(name), options.start_s, exact=False)


def start(
    copies: Copies, stack: ExitStack, options: argparse.Namespace, names: Sequence[str] | None = None
) -> list[Arm]:
    """Start one process per arm, all of them or those named, so that no arm profits from another's cache."""
    given = pairs.defaults(options) if options.shape is None else ()
    # Without pauses nothing is made dense in idle time but behind the last turn, where an arm is only waited for.
    idle = {"MLX_SPECPREFILL_DENSIFY": "on" if options.pause else "off"}

    def ours(name: str, **more: str) -> AbstractContextManager[Server]:
        return copies.ours(*given, "--prefix-cache-dir", str(copies.folder / f"prefixes of {name}"), **(idle | more))

    made = {OURS: lambda: ours(OURS), FULL: lambda: ours(FULL)} | ({} if options.alone else {PEER: copies.mlx_lm})
    if options.edits:
        made[NO_REUSE] = lambda: ours(NO_REUSE, MLX_SPECPREFILL_REUSE="off")
    if options.vllm_mlx:
        made["vllm-mlx"] = lambda: copies.vllm_mlx(options.vllm_mlx, "vllm-mlx", "--continuous-batching")
    arms = [
        Arm(name, made[name], DENSE if name == FULL else {}, stack.enter_context(ExitStack())) for name in names or made
    ]
    for arm in arms:
        arm.start()
    return arms


def counter(copies: Copies) -> Callable[[str], int]:
    """Return a counter of a text's tokens."""
    tokenizer = Tokenizer.from_file(str(copies.target / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def measured(arms: list[Arm], count: Count, options: argparse.Namespace) -> Results:
    """Run all arms, each of them first in turn, so that disturbances of the machine reach all of them."""
    results: Results = {kind: {arm.name: [] for arm in arms} for kind in options.sessions}
    for repeat in range(options.repeats):
        first = repeat % len(arms)
        for kind in options.sessions:
            session = make_session(KINDS[kind], options.tokens, f"{options.seed}/{repeat}/{kind}", count)
            if options.shape:  # random weights know no facts
                asked = [replace(step, code="") for step in session.steps]
                session = replace(session, steps=tuple(asked), after=())
            edits = (
                make_edits((len(session.steps) - 1) // EDIT_EVERY, f"{options.seed}/{repeat}", count)
                if options.edits
                else ()
            )
            for arm in (*arms[first:], *arms[:first]):
                results[kind][arm.name].append(play(arm, session, options.pause, edits))
                print(f"{kind}, {repeat + 1} of {options.repeats}, {arm.name}", file=sys.stderr, flush=True)
    return results
