"""`scripts/bench NAME [--quick] [options]`: the options, the run, and the report as the last line of the output."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_specprefill import SpecPrefillError
from mlx_specprefill_server.pairs import PairsError

from . import BenchError, pairs

FOLDER = Path(__file__).resolve().parent.parent
PROGRAM = "scripts/bench"


def listed() -> dict[str, str]:
    """Return every benchmark with its first line, without importing any."""
    files = sorted(file for file in FOLDER.glob("*.py") if not file.name.startswith("_"))
    said = {file.stem: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) for file in files}
    return {name: (text or "").partition("\n")[0] for name, text in said.items()}


def benchmark(name: str) -> Any:
    """Return a module with `add_options(parser)`, `run(options)` and `QUICK`, the options that `--quick` sets."""
    return importlib.import_module(f"benchmarks.{name}")


def main(arguments: Sequence[str]) -> int:
    """Run a benchmark. Return 0 if it measured, 1 if its report counts `different` answers, 2 if it could not run."""
    name, *rest = arguments or ["--help"]
    names = listed()
    if name in ("-h", "--help"):
        print(f"usage: {PROGRAM} NAME [--quick] [options]; {PROGRAM} NAME --help shows them\n")
        print("\n".join(f"  {name:<13}{line}" for name, line in names.items()))
        return 0
    if name not in names:
        print(f"error: there is no benchmark {name!r}: choose from {', '.join(names)}", file=sys.stderr)
        return 2
    chosen = benchmark(name)
    options = parsed(name, chosen, rest)
    try:
        report = chosen.run(options)
    except (BenchError, SpecPrefillError, PairsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report))
    return 1 if report.get("different") else 0


def parsed(name: str, chosen: Any, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {name}",
        description=chosen.__doc__,
        epilog="The last line of the output is one JSON object.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pairs.add_options(parser)
    parser.add_argument("--quick", action="store_true", help=f"smaller: {_written(chosen.QUICK)}")
    chosen.add_options(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        parser.set_defaults(**chosen.QUICK)
        options = parser.parse_args(arguments)
    return options


def _written(quick: dict[str, Any]) -> str:
    values = {name: value if isinstance(value, list) else [value] for name, value in quick.items()}
    return ", ".join(" ".join([name.replace("_", "-"), *map(str, value)]) for name, value in values.items())
