"""Sessions of coding agents in the shape of recorded ones: the messages of each turn, and the facts to recall."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_specprefill_evals import words
from mlx_specprefill_evals.facts import six_digits

from .text import question, secret

Message = dict[str, Any]
Count = Callable[[str], int]
Kind = Literal["read", "search", "edit", "test"]
Work = tuple[tuple[Kind | Literal["ask"], float], ...]

# As models that call tools have it: system text and tools in one message, calls in tags, results from the user's side.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if loop.first and tools and m['role'] == 'system' %}"
    "{{ '<|im_start|>system\n' + m['content'] + '\n\n# Tools\n\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}"
    "{% elif m['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m['content'] + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m.get('tool_calls') or [] %}"
    "{{ '<tool_call>\n' }}"
    "{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}"
    "{{ '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Turns of a session by what comes back, in shares of what it grows to; "ask": the user asks for a fact.
WORK: Work = (
    ("read", 0.16),
    ("search", 0.05),
    ("read", 0.09),
    ("edit", 0.01),
    ("test", 0.11),
    ("ask", 0.0),
    ("read", 0.13),
    ("edit", 0.01),
    ("test", 0.06),
    ("search", 0.03),
    ("ask", 0.0),
    ("read", 0.06),
    ("test", 0.02),
    ("ask", 0.0),
)
FACTS = 20  # of a session, about: every result but an edit has one, and more by its share

# 1065 results of recorded sessions: the median, what a tenth exceeds, the largest, and the share of all tokens that is
# in results above LONG. A log-normal distribution that is cut off at the largest meets all four.
MEDIAN, NINTH_DECILE, LARGEST = 256, 2149, 22318
LONG, LONG_SHARE = 2048, 0.59
TYPICAL = 5000  # tokens: as many hold a session of such results


@dataclass(frozen=True)
class Shape:
    """Shares of the tokens of a session.

    Attributes:
        system, tools: of the system text and of the schemas; no tools: 0.
        request: of the user's first message.
        work: the turns after it; empty: results with the sizes of recorded ones.
        document: the request holds a fact for each turn and asks for the first.
    """

    system: float = 0.1
    tools: float = 0.15
    request: float = 0.02
    work: Work = WORK
    document: bool = False


KINDS = {
    "growth": Shape(),
    "long results": Shape(work=()),
    "document": Shape(system=0.01, tools=0.0, request=0.97, work=(("ask", 0.0),) * 9, document=True),
}


@dataclass(frozen=True)
class Step:
    """The message before a request, and the text its answer must contain.

    Attributes:
        said: a tool's result, or what the user says.
        call: what the model is taken to have called for it; None: the user speaks.
        code: what the answer has to hold; "": nothing is asked.
        told: the number of the step that said it.
    """

    said: str
    call: tuple[str, dict[str, Any]] | None = None
    code: str = ""
    told: int = 0

    def messages(self, number: int) -> list[Message]:
        """Return the messages that a client appends. A call is a message of its own, after the model's real text."""
        if self.call is None:
            return [{"role": "user", "content": self.said}]
        name, arguments = self.call
        call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "name": name, "content": self.said},
        ]


@dataclass(frozen=True)
class Session:
    """One conversation.

    Attributes:
        after: questions for what the steps have not asked for, each to be sent behind the last step.
        opening: tokens of the system text and the tools, about.
    """

    system: str
    tools: list[dict[str, Any]]
    steps: tuple[Step, ...]
    after: tuple[Step, ...] = ()
    opening: int = 0


@dataclass
class _Facts:
    """Facts without a question yet, oldest first: name, code, and the step that stated it."""

    rng: random.Random
    known: list[tuple[str, str, int]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def new(self, step: int, number: int) -> list[str]:
        said = []
        for _ in range(number):
            while (name := words.person(self.rng)) in self.names:
                pass
            self.names.add(name)
            self.known.append((name, six_digits(self.rng), step))
            said.append(secret(*self.known[-1][:2]))
        return said

    def asked(self, at: int, behind: str = "") -> Step:
        """Return a question for one of them, after other text of the same message."""
        name, code, told = self.known.pop(at)
        return Step(behind + question(name), code=code, told=told)


def make_session(shape: Shape, tokens: int, seed: int | str, count: Count) -> Session:
    """Return a session that grows to about so many tokens.

    Args:
        count: tokens of a text.
    """
    rng = random.Random(f"agents/{seed}")
    facts = _Facts(rng)
    system = instructions(rng, round(shape.system * tokens), count)
    schemas = tools(rng, round(shape.tools * tokens), count) if shape.tools else []
    work = shape.work or _recorded(rng, tokens, 1 - shape.system - shape.tools - shape.request)
    request = task(rng, round(shape.request * tokens), count, facts.new(0, (1 + len(work)) * shape.document))
    steps = [facts.asked(0, f"{request}\n\n") if shape.document else Step(request)]
    for number, (kind, share) in enumerate(work):
        if kind == "ask":
            steps.append(facts.asked((0, -1, len(facts.known) // 2)[number % 3]))
        else:
            said = [] if kind == "edit" else facts.new(len(steps), 1 + int(FACTS * share))
            call = call_of(kind, rng)
            left = round(share * tokens) - count(json.dumps(call)) - count("\n".join(said))
            steps.append(Step(result(kind, rng, left, count, said), call))
    after = tuple(facts.asked(0) for _ in range(len(facts.known)))
    opening = count(system) + sum(count(json.dumps(schema) + "\n") for schema in schemas)
    return Session(system, schemas, tuple(steps), after, opening)


def sizes(rng: random.Random, tokens: int) -> list[int]:
    """Return sizes of results, in tokens, with about this sum.

    Draws in which large results have another share than in recorded sessions are thrown away. Where less than a typical
    session is wanted, all of them are smaller.
    """
    scale, spread = min(1.0, tokens / TYPICAL), math.log(NINTH_DECILE / MEDIAN) / statistics.NormalDist().inv_cdf(0.9)
    while True:
        drawn: list[float] = []
        while sum(drawn) < 0.95 * tokens:
            drawn += [scale * size for size in [rng.lognormvariate(math.log(MEDIAN), spread)] if size <= LARGEST]
        share = sum(size for size in drawn if size > scale * LONG) / sum(drawn)
        if sum(drawn) <= 1.05 * tokens and abs(share - LONG_SHARE) <= 0.1:
            return [max(1, round(size)) for size in drawn]


def _recorded(rng: random.Random, tokens: int, share: float) -> Work:
    """Return turns with results of recorded sizes, a question after every third one, and a long result at the end."""
    found = sizes(rng, round(share * tokens))
    found.append(found.pop(found.index(sorted(found)[-2])))
    work: list[tuple[Any, float]] = []
    for number, size in enumerate(found):
        work += [("ask", 0.0)] if number and number % 3 == 0 else []
        work.append((rng.choice(("read", "search", "test")), size / tokens))
    return tuple(work)


# --- texts of any length, with words of our own ---------------------------------------------------------------------

CODE = (
    "def {verb}_{item}({word}: int, {place}: str) -> {word2}:",
    '    """The {adj} {item} of a {place}, or None where nobody {verb} it."""',
    "    if {word} > {num} and not self.{item}s:",
    "        raise {adj}Error(f'no {item} at {{{place}}}')",
    "    self.{item}s[{word}] = {place}.{verb}({num})",
    "    for {word2} in {verb}_all({item}, limit={num}):",
    "        total += {word2}.{place} * {num}",
    "    return {{'{item}': {word}, '{place}': {num}}}",
    "class {adj}{item}({word2}Base):",
    "    {place}: dict[str, {word}] = field(default_factory=dict)",
    "    # {adj} {item}s come from the {place}; the {word} is counted twice",
    "@{verb}.register('{place}/{item}')",
    "",
)
RULES = (
    "- When the user asks for a {item}, look at the {place} first and never guess its {word}.",
    "- Prefer {adj} changes. Do not touch a {item} that nobody asked about.",
    "- Before you finish, run the tests of the {place} and say which of them failed.",
    "- Paths are absolute. A {word} is written with its {place}, as in {place}/{item}.",
    "- Answer in fewer than {num} lines unless the {item} needs more.",
)
FRAMES = ("{verb}_{item}", "{place}_{item}", "{adj}_{place}")
NAMES_OF_TOOLS = ("read_file", "search", "edit_file", "run_tests", "list_files", "write_file", "fetch", "plan")


def filled(rng: random.Random, frame: str) -> str:
    """Fill a frame with words that no model was trained to expect there."""
    return frame.format(
        verb=rng.choice(words.VERBS),
        item=rng.choice(words.ITEMS),
        place=rng.choice(words.PLACES),
        adj=rng.choice(words.ADJECTIVES),
        word=words.invented_word(rng),
        word2=words.invented_word(rng),
        num=rng.randrange(2, 900),
    )


def module_path(rng: random.Random, folder: str = "src") -> str:
    return f"{folder}/{rng.choice(words.PLACES)}/{filled(rng, rng.choice(FRAMES))}.py"


def _lines(parts: Iterator[str], tokens: int, count: Count) -> list[str]:
    """Return as many lines as fit, at least one."""
    lines = [next(parts)]
    used = count(lines[0] + "\n")
    for line in parts:
        used += count(line + "\n")
        if used > tokens:
            return lines
        lines.append(line)
    return lines


def instructions(rng: random.Random, tokens: int, count: Count) -> str:
    """Return a system prompt."""
    head = "You are a coding agent in a terminal. You work on the user's repository with the tools that you are given."
    rules = iter(lambda: filled(rng, rng.choice(RULES)), "")
    return "\n".join([head, "", "# Rules", *_lines(rules, max(1, tokens - count(head)), count)])


def tools(rng: random.Random, tokens: int, count: Count) -> list[dict[str, Any]]:
    """Return schemas of function tools as agents send them, with about so many tokens."""
    each, found = tokens // len(NAMES_OF_TOOLS), []
    for name in NAMES_OF_TOOLS:
        said = iter(lambda: filled(rng, rng.choice(RULES)).removeprefix("- "), "")
        parameters = {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": filled(rng, "The {adj} {item}, relative to the {place}.")},
                "limit": {"type": "integer", "description": filled(rng, "How many {item}s at most.")},
            },
            "required": ["path"],
        }
        text = " ".join(_lines(said, max(1, each - 120), count))
        found.append({"type": "function", "function": {"name": name, "description": text, "parameters": parameters}})
    return found


def task(rng: random.Random, tokens: int, count: Count, facts: Sequence[str] = ()) -> str:
    """Return a user's first message, with the facts spread over it."""
    asked = filled(rng, "Please make the {adj} {item} of the {place} {verb} once only, and add a test for it.")
    notes = iter(lambda: filled(rng, "The {item} in {place}/{word} is {adj}; {word2} comes behind it."), "")
    lines = _lines(notes, max(1, tokens - count(" ".join([asked, *facts]))), count)
    each = len(lines) / max(1, len(facts))
    for number in reversed(range(len(facts))):
        lines.insert(round((number + 0.5) * each), facts[number])
    return " ".join([asked, *lines])


def call_of(kind: Kind, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the name of the tool for such a result, and its arguments."""
    name = {"read": "read_file", "search": "search", "edit": "edit_file", "test": "run_tests"}[kind]
    return name, {"path": module_path(rng, "tests" if kind == "test" else "src"), "limit": rng.randrange(50, 2000)}


def result(kind: Kind, rng: random.Random, tokens: int, count: Count, facts: Sequence[str] = ()) -> str:
    """Return a tool's result, with each fact in a line of its own somewhere in the middle."""
    lines = {"read": _file, "search": _search, "edit": _diff, "test": _log}[kind](rng, tokens, count)
    for fact in facts:
        at = rng.randrange(len(lines) // 5, max(1, 4 * len(lines) // 5) + 1)
        lines.insert(at, _carried(kind, rng, fact))
    if kind == "read":
        lines = [f"{number:>6}\t{line}" for number, line in enumerate(lines, rng.randrange(1, 400))]
    return "\n".join(lines)


def _carried(kind: Kind, rng: random.Random, fact: str) -> str:
    if kind == "search":
        return f"{module_path(rng)}:{rng.randrange(1, 900)}: # {fact}"
    return f"INFO {fact}" if kind == "test" else f"    # {fact}"


def _file(rng: random.Random, tokens: int, count: Count) -> list[str]:
    numbers = count("   123\t") - 1
    return _lines(_code(rng), tokens, lambda line: count(line) + numbers)


def _code(rng: random.Random) -> Iterator[str]:
    while True:
        yield filled(rng, rng.choice(CODE))


def _search(rng: random.Random, tokens: int, count: Count) -> list[str]:
    found = (f"{module_path(rng)}:{rng.randrange(1, 900)}: {line.strip()}" for line in _code(rng) if line)
    return _lines(found, tokens, count)


def _diff(rng: random.Random, tokens: int, count: Count) -> list[str]:
    path = module_path(rng)
    head = [f"Updated {path}", f"--- a/{path}", f"+++ b/{path}", f"@@ -{rng.randrange(1, 400)},9 +12,11 @@"]
    changed = (rng.choice(" -+") + line for line in _code(rng))
    return [*head, *_lines(changed, max(1, tokens - count("\n".join(head))), count)]


def _log(rng: random.Random, tokens: int, count: Count) -> list[str]:
    """Return the log of a test run. Most tests pass, and one fails with a traceback."""
    path = module_path(rng)
    failure = [
        "=" * 20 + " FAILURES " + "=" * 20,
        *(filled(rng, rng.choice(CODE)) for _ in range(4)),
        filled(rng, "E       AssertionError: assert {num} == '{word}'"),
        f"{path}:{rng.randrange(10, 400)}: AssertionError",
        f"1 failed, {rng.randrange(20, 900)} passed in {rng.randrange(2, 90)}.{rng.randrange(10, 99)}s",
    ]
    return [*_lines(_passed(rng), max(1, tokens - count("\n".join(failure))), count), *failure]


def _passed(rng: random.Random) -> Iterator[str]:
    while True:
        name = filled(rng, "test_{verb}_{item}")
        yield f"{module_path(rng, 'tests')}::{name} PASSED [{rng.randrange(1, 100):>3}%]"
