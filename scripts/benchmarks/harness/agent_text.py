"""What coding agents put into prompts, of any length and with words of our own: instructions, tools, files, logs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Literal

from mlx_specprefill_evals import words

__all__ = ["Count", "Kind", "call_of", "instructions", "module_path", "result", "task", "tools"]

Count = Callable[[str], int]
Kind = Literal["read", "search", "edit", "test"]

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
    """A frame with words that no model was trained to expect there."""
    return frame.format(
        verb=rng.choice(words.VERBS),
        item=rng.choice(words.ITEMS),
        place=rng.choice(words.PLACES),
        adj=rng.choice(words.ADJECTIVES),
        word=words.invented_word(rng, True),
        word2=words.invented_word(rng, True),
        num=rng.randrange(2, 900),
    )


def module_path(rng: random.Random, folder: str = "src") -> str:
    return f"{folder}/{rng.choice(words.PLACES)}/{filled(rng, rng.choice(FRAMES))}.py"


def _lines(parts: Iterator[str], tokens: int, count: Count) -> list[str]:
    """As many as fit, at least one."""
    lines, used = [next(parts)], 0
    used = count(lines[0] + "\n")
    for line in parts:
        used += count(line + "\n")
        if used > tokens:
            return lines
        lines.append(line)
    return lines


def instructions(rng: random.Random, tokens: int, count: Count) -> str:
    """A system prompt."""
    head = "You are a coding agent in a terminal. You work on the user's repository with the tools that you are given."
    rules = iter(lambda: filled(rng, rng.choice(RULES)), "")
    return "\n".join([head, "", "# Rules", *_lines(rules, max(1, tokens - count(head)), count)])


def tools(rng: random.Random, tokens: int, count: Count) -> list[dict[str, Any]]:
    """Schemas of function tools as agents send them, together about so long."""
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


def task(rng: random.Random, tokens: int, count: Count) -> str:
    """What a user asks for at first."""
    asked = filled(rng, "Please make the {adj} {item} of the {place} {verb} once only, and add a test for it.")
    notes = iter(lambda: filled(rng, "The {item} in {place}/{word} is {adj}; {word2} has {num} of them."), "")
    return " ".join([asked, *_lines(notes, max(1, tokens - count(asked)), count)])


def call_of(kind: Kind, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """The name of the tool that gives such a result, and its arguments."""
    name = {"read": "read_file", "search": "search", "edit": "edit_file", "test": "run_tests"}[kind]
    return name, {"path": module_path(rng, "tests" if kind == "test" else "src"), "limit": rng.randrange(50, 2000)}


def result(kind: Kind, rng: random.Random, tokens: int, count: Count, fact: str = "") -> str:
    """What a tool returns, with the fact in a line of its own somewhere in the middle."""
    lines = {"read": _file, "search": _search, "edit": _diff, "test": _log}[kind](rng, tokens, count)
    if fact:
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
    """A run of tests: most pass, one fails with a traceback."""
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
