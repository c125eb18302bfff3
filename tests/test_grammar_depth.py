"""The bound on a grammar's depth against brute force, and grammars that would overflow the stack without it."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specprefill.grammar_depth import depth_of

ROOT = Path(__file__).parents[1]
RULES = [f"r{i}" for i in range(5)]
GRAPHS = st.fixed_dictionaries({name: st.lists(st.sampled_from(RULES), max_size=3) for name in RULES})


def lark(graph: dict[str, list[str]]) -> str:
    return "\n".join(f'{name}: {" ".join(used)} "a"' for name, used in graph.items())


def schema(graph: dict[str, list[str]]) -> str:
    named = {name: {"anyOf": [{"$ref": f"#/$defs/{one}"} for one in used]} for name, used in graph.items()}
    return f"start: j\nj: %json {json.dumps({'$ref': '#/$defs/r0', '$defs': named})}"


def longest_way(graph: dict[str, list[str]]) -> int:
    """The number of rules on the longest way that visits none twice."""
    ways = [way for size in range(1, len(graph) + 1) for way in permutations(graph, size)]
    return max(len(way) for way in ways if all(b in graph[a] for a, b in pairwise(way)))


@settings(max_examples=200)
@given(graph=GRAPHS)
def test_no_way_along_rules_or_references_is_longer_than_the_bound(graph: dict[str, list[str]]) -> None:
    assert longest_way(graph) <= depth_of(lark(graph)) <= len(graph) + 1  # what comes before all rules
    assert longest_way(graph) <= depth_of(schema(graph))


def chain(count: int, body: str = "{}", name: str = "r") -> str:
    lines = [f"{name}{i}: {body.format(f'{name}{i + 1}')}" for i in range(count)]
    return "\n".join([f"start: {name}0", *reversed(lines), f'{name}{count}: "x"'])


@pytest.mark.parametrize(
    ("grammar", "least", "most"),
    [
        (chain(500), 500, 510),
        (chain(500, name="T-_"), 500, 510),
        (chain(500, "(({})? | /x/)"), 1500, 2010),
        (chain(500, '"a:" {} // r0'), 500, 510),
        (chain(500, '/"/ {} /"/'), 500, 510),
        (chain(500, '"a"? "b"* {}'), 500, 510),
        (chain(500).replace("\nr", "\n?r"), 500, 510),
        (chain(500).replace(":", "[lazy, max_tokens=3]:"), 500, 1510),
        (chain(500).replace("r1:", "r1::_:").replace("r1\n", "r1::0x0\n"), 500, 510),
        ("start: s\ns: %lark {\n" + chain(500) + "\n}", 500, 1010),
        (json.dumps({"grammars": [{"lark_grammar": chain(500)}]}), 500, 510),
        ("start: r0\n" + "\n".join(f'r{i}: "r{i + 1}" /r{i + 1}/ # r{i + 1}' for i in range(500)), 1, 3),
        ("start: " + " | ".join(f'"a{i}"' for i in range(500)), 1, 2),
    ],
)
def test_what_counts_as_depth(grammar: str, least: int, most: int) -> None:
    assert least <= depth_of(grammar) <= most


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("start: " + '"a" ' * 40_000, "32768 names and literals"),
        ("start: j\nj: %json {", "its JSON can't be read"),
        ("start: j\nj: %json " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("start: j\nj: %json " + json.dumps({"patternProperties": {f"a{i}": {} for i in range(101)}}), "101 pattern"),
    ],
)
def test_what_is_refused_before_it_is_compiled(grammar: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        depth_of(grammar)


@pytest.mark.parametrize(
    "count", [12, pytest.param(50, marks=pytest.mark.extended), pytest.param(2000, marks=pytest.mark.nightly)]
)
def test_no_hostile_grammar_schema_or_tool_ends_the_process(count: int) -> None:
    """On the smallest stack that a thread has anywhere."""
    command = [sys.executable, "-m", "tests.support.hostile", str(count), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    ends: dict[str, Any] = json.loads(done.stdout)
    assert sum(ends.values()) == count
    assert min(ends[end] for end in ("taken", "deep", "refused")) >= count / 50
