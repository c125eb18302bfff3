"""Grammars that would overflow a usual stack compile, and what would take minutes is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_specprefill import Constraint, InvalidRequestError
from mlx_specprefill.choosing.constraints import Grammars, grammar_warnings

from ..server.fakes import byte_tokenizer

ROOT = Path(__file__).parents[2]
TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, frozenset(TOKENIZER.eos_token_ids))


def chain(count: int, body: str = "{}") -> str:
    lines = [f"r{i}: {body.format(f'r{i + 1}')}" for i in range(count)]
    return "\n".join(["start: r0", *reversed(lines), f'r{count}: "x"'])


def references(count: int) -> str:
    named: Any = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)} | {f"a{count}": {"type": "integer"}}
    return f"start: %json {json.dumps({'$ref': '#/$defs/a0', '$defs': named})}"


@pytest.mark.parametrize("grammar", [chain(1990), chain(400, '"a" | ({} "b")'), references(20_000)],
                         ids=["rules", "alternatives", "references"])  # fmt: skip
def test_deep_grammars_compile(grammar: str) -> None:
    GRAMMARS.check(Constraint(grammar))
    assert grammar_warnings(grammar) == []


PATTERNS = json.dumps({"patternProperties": {f"a{i}": {} for i in range(101)}})


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (chain(2001), "lines, more than 2000"),
        (f"start: j\nj: %json {PATTERNS}", "101 pattern"),
        (f"start: j\nj: %json\n{PATTERNS.replace('Prop', 'P' + chr(92) + 'u0072op')}", "101 pattern"),
        ("start: j\nj: %json {", "EOF|JSON|json"),
        ("start: j\nj: %json " + "[" * 5000 + "]" * 5000, "recursion limit"),
    ],
)
def test_what_would_take_long_is_refused(grammar: str, said: str) -> None:
    for check in (grammar_warnings, lambda text: GRAMMARS.check(Constraint(text))):
        with pytest.raises((ValueError, InvalidRequestError), match=said):
            check(grammar)


def test_what_its_tables_can_not_hold_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the grammar has too many parts"):
        GRAMMARS.check(Constraint("start: " + '"a" ' * 70_000))


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
    assert min(ends.get(end, 0) for end in ("taken", "refused")) >= count // 50
