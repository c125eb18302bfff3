#!/usr/bin/env python3
"""What keeps the packages readable: nine of ten functions have at most 20 lines, and no file more than 400."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mlx_specprefill", "server/mlx_specprefill_server", "server/mlx_specprefill_evals")
MOST_LINES, P90 = 400, 20


def main() -> int:
    lengths: list[int] = []
    too_long = []
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lengths += [length for _, length in functions(text)]
        if (lines := text.count("\n")) > MOST_LINES:
            too_long.append(f"{path.relative_to(ROOT)} has {lines} lines, at most {MOST_LINES} are allowed")
    p90 = sorted(lengths)[int(0.9 * len(lengths))]
    print(f"{len(lengths)} functions: 90 % have at most {p90} lines, the longest {max(lengths)}")
    if p90 > P90:
        too_long.append(f"90 % of the functions may have at most {P90} lines, not {p90}")
    print(*too_long, sep="\n", end="\n" if too_long else "")
    return int(bool(too_long))


def functions(text: str) -> list[tuple[str, int]]:
    """Name and lines of each function, its decorators left out."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in found]


if __name__ == "__main__":
    sys.exit(main())
