"""Every regular expression of the product takes time in proportion to the text, whatever the text."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

import mlx_specprefill
import mlx_specprefill_server

PACKAGES = (mlx_specprefill, mlx_specprefill_server)
METHODS = "search", "match", "fullmatch", "finditer", "findall", "sub", "split"
# Characters of a line, and how many of the slowest lines go on to that length. The next one is at most twelve times as
# long: what is quadratic fails before it takes minutes.
SIZES = ((256, 1 << 20), (2048, 12), (16_384, 6), (200_000, 3))
PER_CHARACTER_S = 8e-6  # nine times what the slowest pattern takes
CLASSES = {"DIGIT": "0", "SPACE": " \t\n", "WORD": "a_0", "NOT_DIGIT": "a ", "NOT_SPACE": "a0.", "NOT_WORD": " ."}
OTHERS = "a0 \n!"  # in lines for every pattern
# Patterns made in functions: of escaped names, and for texts of this machine, which no client sends.
MADE = {"lark.py", "spans.py", "special_tokens.py"}
OF_THIS_MACHINE = {"bench.py", "examination.py", "pairs.py", "one_model.py"}


# --- the patterns ---------------------------------------------------------------------------------------------------


def modules() -> Iterator[Any]:
    for package in PACKAGES:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                yield importlib.import_module(found.name)


def patterns_in(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, re.Pattern[Any]]]:
    """Yield the patterns in an attribute, in a class of ours and in containers."""
    if isinstance(value, re.Pattern):
        yield name, value
    elif depth and isinstance(value, type) and value.__module__.startswith("mlx_specprefill"):
        for key, inner in vars(value).items():
            yield from patterns_in(key, inner, depth - 1)
    elif depth and isinstance(value, dict | tuple | list | set | frozenset):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from patterns_in(name, inner, depth - 1)


@cache
def trees() -> dict[str, ast.Module]:
    """Return the source of each file of the product."""
    paths = [path for package in PACKAGES for path in Path(package.__path__[0]).rglob("*.py")]
    return {str(path): ast.parse(path.read_text()) for path in paths}


def methods(file: str, name: str) -> set[str]:
    """Return the methods that a module uses of what has this name there."""
    nodes = [node for node in ast.walk(trees()[file]) if isinstance(node, ast.Attribute) and node.attr in METHODS]
    return {node.attr for node in nodes if name in (getattr(node.value, "id", ""), getattr(node.value, "attr", ""))}


def patterns() -> Iterator[Any]:
    """Yield each pattern with the methods that the product uses of it: all where none is seen."""
    names, used = dict[re.Pattern[Any], str](), defaultdict[re.Pattern[Any], set[str]](set)
    for module in modules():
        for key, value in vars(module).items():
            for name, pattern in patterns_in(key, value):
                names.setdefault(pattern, f"{module.__name__}.{name}")
                used[pattern] |= methods(module.__file__, name)
    for pattern, name in names.items():
        yield pytest.param(pattern, used[pattern] or {*METHODS}, id=name)


# --- hostile lines --------------------------------------------------------------------------------------------------


def inside(code: Any, value: Any) -> list[Any]:
    """Return what is nested in a token of a pattern."""
    if code is codes.BRANCH:
        return list(value[1])
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        return [value[2]]
    if code is codes.SUBPATTERN:
        return [value[-1]]
    return [value[1]] if code in (codes.ASSERT, codes.ASSERT_NOT) else []


def signs(tokens: Iterable[Any]) -> Iterator[str]:
    """Yield characters of every class and literal of a pattern."""
    for code, value in tokens:
        if code in (codes.LITERAL, codes.NOT_LITERAL):
            yield chr(value)
        elif code is codes.RANGE:
            yield chr(value[0])
        elif code is codes.CATEGORY:
            yield from CLASSES[str(value).removeprefix("CATEGORY_")]
        else:
            for inner in [value] if code is codes.IN else inside(code, value):
                yield from signs(inner)


def beginnings(tokens: Iterable[Any], pick: int) -> Iterator[str]:
    """Yield what a pattern matches, up to each of its tokens. `pick` chooses among alternatives."""
    text = ""
    for code, value in tokens:
        nested = inside(code, value)
        if code in (codes.LITERAL, codes.IN):
            chosen = list(signs([(code, value)])) if code is codes.LITERAL or value[0][0] is not codes.NEGATE else ["a"]
            text += chosen[pick % len(chosen)]
        elif code in (codes.ANY, codes.NOT_LITERAL):
            text += "a"
        elif nested and code is not codes.ASSERT_NOT:
            least = min(max(value[0], 1), 32) if "REPEAT" in str(code) else 1
            text += whole(nested[pick % len(nested)], pick) * least
        yield text


def whole(tokens: Iterable[Any], pick: int) -> str:
    return [*beginnings(tokens, pick), ""][-2 if tokens else -1]


def nested(tokens: Iterable[Any]) -> Iterator[Any]:
    """Yield a pattern and all that is nested in it: alternatives, repetitions, groups."""
    yield tokens
    for code, value in tokens:
        for inner in inside(code, value):
            yield from nested(inner)


def hostile(pattern: re.Pattern[Any]) -> set[tuple[str, str, str]]:
    """Return beginnings, what is repeated behind each, and ends: near misses of a pattern and of its parts."""
    text = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    tree = parser.parse(text, pattern.flags & ~re.UNICODE)
    some = list(dict.fromkeys([*signs(tree), *OTHERS]))[:20]
    parts = {whole(part, pick) for part in nested(tree) for pick in range(3)} - {""}
    begins = {"", *(begin for pick in range(3) for part in nested(tree) for begin in beginnings(part, pick))}
    begins = {*sorted(begins, key=len)[:40]}
    pumps = {*parts, *some}
    lines = {*product(begins, pumps), *product([""], {one + other for one, other in product(begins | {*some}, some)})}
    return {(begin, pump, end) for begin, pump in lines for end in ("", "!", "\n")}


def seconds(call: Callable[[Any], object], text: Any, times: int) -> float:
    """Return the least processor time of a few calls."""
    found = []
    for _ in range(times):
        begun = time.thread_time()
        call(text)
        found.append(time.thread_time() - begun)
    return min(found)


def slow_line(pattern: re.Pattern[Any], method: str) -> str | None:
    """Return a line that takes a pattern more time than in proportion to its length."""
    is_text, used = isinstance(pattern.pattern, str), getattr(pattern, method)
    made: dict[str, Callable[[Any], object]] = {
        "finditer": lambda text: deque(used(text), 0),
        "sub": lambda text: used(text[:0], text),
    }
    call, lines = made.get(method, used), [*hostile(pattern)]
    for size, most in SIZES:
        took = []
        for begin, pump, end in lines[-most:]:
            line = begin + pump * (size // len(pump)) + end
            text: Any = line if is_text else line.encode("latin-1", "ignore")
            spent = seconds(call, text, 1)
            if spent > PER_CHARACTER_S * size and (spent := seconds(call, text, 3)) > PER_CHARACTER_S * size:
                return f"{begin!r}, then {size} characters of {pump!r}, then {end!r}: {spent:.3f} s"
            took.append((spent, (begin, pump, end)))
        lines = [parts for _, parts in sorted(took)]
    return None


# --- the tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pattern", "used"), [*patterns()])
def test_a_pattern_takes_time_in_proportion_to_the_line(pattern: re.Pattern[Any], used: set[str]) -> None:
    assert {method: line for method in sorted(used) if (line := slow_line(pattern, method)) is not None} == {}


def test_the_lines_find_what_is_quadratic() -> None:
    for text, method in ((r"</?[\w-]+[^<>]*>|```.*", "fullmatch"), (r"a+b", "search"), (r"\s+$", "search")):
        assert slow_line(re.compile(text), method) is not None


def test_no_pattern_for_a_clients_text_is_hidden_in_a_function() -> None:
    hidden = set[str]()
    for path, tree in trees().items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for node in (node for function in functions for node in ast.walk(function)):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in {f"re.{method}" for method in (*METHODS, "compile")}:
                hidden.add(Path(path).name)
    assert hidden <= MADE | OF_THIS_MACHINE
