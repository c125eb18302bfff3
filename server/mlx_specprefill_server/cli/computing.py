"""`mlx-specprefill doctor --compute`: checks of this device's results, and its speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from mlx_specprefill import Check, check_device, forward_times, sync_ms

from ..benchmark import load_before, measured_here, short_name
from ..monitoring.access_log import configure_logging
from ..pairs import Pair, size
from .loading import load

__all__ = ["compute"]

_STATES = {"ok": "ok", "failed": "FAILED", "not supported": "-"}


def compute(target: str | None, file: Path | None) -> bool:
    """Print a line per check and the verdict, write the record, and return whether all checks passed.

    Args:
        target: a model whose forwards are timed.
        file: of the record, in JSON.
    """
    load_then = load_before()
    configure_logging("error")
    typer.echo("\nChecking the results of this device, for a minute or two:")
    checks = [_print_check(check) for check in check_device()]
    wait = sync_ms()
    typer.echo(f"\n{_verdict(checks)}\nA synchronisation takes {wait:.3f} ms.")
    record = {**measured_here(load_then), "sync_ms": round(wait, 4), "checks": _summary(checks)}
    if target is not None:
        record["target"] = _time_forwards(target)
    if file is not None:
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        typer.echo(f'{file} is written, for an issue "A measurement" or the page of measured machines.')
    return not record["checks"]["failed"]


def _print_check(check: Check) -> Check:
    error = "" if check.error is None else f"{check.error:.1e}, limit {check.limit:g}"
    words = check.words or (error if check.state == "failed" else error.partition(",")[0])
    if check.state == "not supported":
        words = f"not supported here: {words}"
    typer.echo(f"{_STATES[check.state]:<6} {check.model:<20} {check.dtype:<8}  {check.operation:<29} {words}".rstrip())
    return check


def _verdict(checks: Sequence[Check]) -> str:
    failed = [check for check in checks if check.state == "failed"]
    skipped = [f"{check.model} in {check.dtype}" for check in checks if check.state == "not supported"]
    tried = len(checks) - len(skipped)
    said = f"FAILED: {len(failed)} of {tried} checks." if failed else f"All {tried} checks pass."
    return f"{said} Not supported here: {', '.join(skipped)}." if skipped else said


def _summary(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the largest error of each operation that passed, and a list of the checks that did not pass."""
    errors: dict[str, dict[str, float]] = {}
    told: dict[str, list[dict[str, Any]]] = {"ok": [], "failed": [], "not supported": []}
    for check in checks:
        told[check.state].append({name: value for name, value in asdict(check).items() if value and name != "state"})
        if check.state == "ok" and check.error is not None:
            found = errors.setdefault(check.operation, {})
            found[check.dtype] = max(found.get(check.dtype, 0.0), float(f"{check.error:.2g}"))
    others = {name: told[name] for name in ("failed", "not supported")}
    return {"passed": len(told["ok"]), **others, "largest errors": errors}


def _time_forwards(target: str) -> dict[str, Any]:
    """Time a target's forwards, and print them."""
    pair = load(Pair(target=target), "auto")
    typer.echo(f"\nForwards of {target}, {pair.dtype}, which can take some minutes:")
    found = forward_times(pair)
    for tokens, ms in found.ms.items():
        typer.echo(f"{tokens:>6} tokens {ms:10.1f} ms")
    typer.echo(
        f"From 128 tokens on: {found.fixed_ms:.1f} ms and {found.token_ms:.3f} ms per token at the start of a prompt.\n"
        f"512 tokens behind 16,384: {found.behind_ms:.0f} ms, and {size(found.behind_bytes)} beside weights and cache."
    )
    return {
        "name": short_name(target),
        "dtype": pair.dtype,
        "ms": {str(tokens): round(ms, 3) for tokens, ms in found.ms.items()},
        "fixed_ms": round(found.fixed_ms, 3),
        "token_ms": round(found.token_ms, 4),
        "pair_ms": float(f"{found.pair_ms:.3g}"),
        "behind_ms": round(found.behind_ms),
        "behind_gb": round(found.behind_bytes / 2**30, 2),
    }
