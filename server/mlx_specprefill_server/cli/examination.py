"""The work of `mlx-specprefill doctor`: the installation, its machine, problems and remedies; the device's results."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import typer
from packaging.requirements import Requirement
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from mlx_specprefill import BLAS, Check, check_device, machine, sync_ms

from .. import __version__
from ..monitoring.logs import configure_logging
from ..pairs import NAMED_PAIRS, pair_state, read_pairs, size
from ..settings.server import ENV_PREFIX, SECRETS, Settings, unknown_variables, what_is_wrong
from .measuring import load_average, measured_here

_STATES = {"ok": "ok", "failed": "FAILED", "not supported": "-"}

_SHOWN = ("mlx", "mlx-lm", "transformers", "numpy", "llguidance", "fastapi")
_LOW_MEMORY = 4 << 30  # bytes; with less, only the bundled pair fits comfortably
_OLDEST_MACOS = 14  # the oldest macOS that MLX has wheels for


def compute_checks(file: Path | None) -> bool:
    """Print a line per check and the verdict, write the record in JSON, and return whether all checks passed."""
    load_before = load_average()
    configure_logging("error")
    typer.echo("\nChecking the results of this device, for about a minute:")
    checks = [_print_check(check) for check in check_device()]
    wait = sync_ms()
    typer.echo(f"\n{_verdict(checks)}\nA synchronisation takes {wait:.3f} ms.")
    record = {**measured_here(load_before), "sync_ms": round(wait, 4), "checks": _summary(checks)}
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
    text = f"FAILED: {len(failed)} of {tried} checks." if failed else f"All {tried} checks pass."
    return f"{text} Not supported here: {', '.join(skipped)}." if skipped else text


def _summary(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the largest error of each operation that passed, and a list of the checks that did not pass."""
    errors: dict[str, dict[str, float]] = {}
    results: dict[str, list[dict[str, Any]]] = {"ok": [], "failed": [], "not supported": []}
    for check in checks:
        results[check.state].append({name: value for name, value in asdict(check).items() if value and name != "state"})
        if check.state == "ok" and check.error is not None:
            largest = errors.setdefault(check.operation, {})
            largest[check.dtype] = max(largest.get(check.dtype, 0.0), float(f"{check.error:.2g}"))
    others = {name: results[name] for name in ("failed", "not supported")}
    return {"passed": len(results["ok"]), **others, "largest errors": errors}


@dataclass(slots=True)
class Finding:
    """One checked part: its description, and its problems, each with a remedy."""

    name: str
    text: str
    problems: list[str] = field(default_factory=list)


def print_findings() -> bool:
    """Print the findings. Return whether there is a problem."""
    findings = examine()
    table = Table(show_edge=False, show_header=False, pad_edge=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(finding.name, finding.text)
    console = Console()
    console.print(table, markup=False, highlight=False)
    problems = [problem for finding in findings for problem in finding.problems]
    typer.echo("\nNothing is wrong." if not problems else "\nWhat is wrong:")
    for problem in problems:
        typer.echo(f"- {problem}")
    return bool(problems)


def examine() -> list[Finding]:
    """Return the finding of each part."""
    parts = (_program, _machine, _memory, _blas, _versions, _settings, _cache, _address, _pairs)
    return [part() for part in parts]


def _program() -> Finding:
    text = f"mlx-specprefill {__version__}, Python {platform.python_version()} ({sys.executable})"
    return Finding("program", text)


def _machine() -> Finding:
    host = machine()
    on_mac = sys.platform == "darwin"
    system = f"macOS {platform.mac_ver()[0]}, {platform.machine()}" if on_mac else platform.platform()
    text = f"{host.device}: {host.name}, {host.cores} cores; {system}"
    return Finding("machine", text, list(_mac_problems(host.has_metal)) if on_mac else [])


def _mac_problems(has_metal: bool) -> Iterator[str]:
    release = platform.mac_ver()[0]
    if int(release.partition(".")[0] or 0) < _OLDEST_MACOS:
        yield f"MLX needs macOS {_OLDEST_MACOS} or newer, this is {release}"
    if platform.machine() != "arm64":
        yield "this Python is made for Intel processors, where MLX has no GPU: install one for arm64"
    if not has_metal:
        yield "MLX found no Metal device: everything runs on the processor, many times slower"
    if _is_slowed():
        yield "Low Power Mode is on: everything takes 1.4 to 3.8 times as long; turn it off in System Settings, Battery"


def _memory() -> Finding:
    host = machine()
    if host.memory is None:
        return Finding("memory", "unknown; set --memory-limit")
    limit = f", {size(host.memory_limit)} for weights, requests and caches" if host.memory_limit else ""
    wired = f"; wired limit {_current().wired_limit}{_wired_limit()}"
    finding = Finding("memory", f"{size(host.memory)}{limit}{wired}")
    if host.memory < _LOW_MEMORY:
        finding.problems.append(f"{size(host.memory)} of memory are enough for the pairs demo and smollm2 only")
    return finding


def _is_slowed() -> bool:
    """Return whether a Mac is in Low Power Mode."""
    try:
        said = subprocess.run(("/usr/bin/pmset", "-g"), capture_output=True, text=True, check=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return re.search(r"^\s*lowpowermode\s+1\s*$", said, re.MULTILINE) is not None


def _wired_limit() -> str:
    """Return the memory that macOS lets the GPU wire, "" on other systems."""
    if sys.platform != "darwin":
        return ""
    command = ("/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb")
    try:
        limit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "; iogpu.wired_limit_mb is not known"
    return f"; iogpu.wired_limit_mb {limit}{' (the default of macOS)' if limit == '0' else ''}"


def _blas() -> Finding:
    finding = Finding("BLAS", f"{BLAS.state}{f': {BLAS.library}' if BLAS.library else ''}")
    if BLAS.notice:
        finding.problems.append(BLAS.notice)
    return finding


def _versions() -> Finding:
    finding = Finding("packages", ", ".join(f"{name} {_installed_version(name) or 'missing'}" for name in _SHOWN))
    try:
        wanted = [Requirement(text) for text in requires("mlx-specprefill") or ()]
    except PackageNotFoundError:  # run from a folder of sources
        return finding
    finding.problems += [
        f"{need.name} {installed or 'is missing'}, but {need.name}{need.specifier} is needed: "
        f'{sys.executable} -m pip install "{need.name}{need.specifier}"'
        for need in wanted
        if need.marker is None or need.marker.evaluate({"extra": ""})
        for installed in [_installed_version(need.name)]
        if installed is None or not need.specifier.contains(installed, prereleases=True)
    ]
    return finding


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _settings() -> Finding:
    given = {name: value for name, value in sorted(os.environ.items()) if name.upper().startswith(ENV_PREFIX)}
    shown = [f"{name}={'(hidden)' if name.lower().endswith(SECRETS) else value}" for name, value in given.items()]
    finding = Finding("settings", ", ".join(shown) or "no variables are set")
    finding.problems += unknown_variables()
    try:
        Settings()
    except ValidationError as error:
        finding.problems.append(what_is_wrong(error))
    return finding


def _current() -> Settings:
    """Return the settings of the environment. Defaults replace wrong values, which `_settings` reports."""
    try:
        return Settings()
    except ValidationError as error:
        wrong = {str(mistake["loc"][0]) for mistake in error.errors() if mistake["loc"]}
        fields = Settings.model_fields
        return Settings(**{name: fields[name].get_default(call_default_factory=True) for name in wrong})


def _cache() -> Finding:
    file = _current().calibration_file
    if file is None:
        return Finding("cache", "none: what is measured is forgotten")
    folder = file.parent
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    finding = Finding("cache", f"{folder} ({size(held) if folder.exists() else 'not made yet'})")
    if not os.access(nearest, os.W_OK) or not nearest.is_dir():
        finding.problems.append(
            f"{folder} can't be written, so that every start measures again: "
            f"make it writable, or set {ENV_PREFIX}CALIBRATION_FILE"
        )
    return finding


def _address() -> Finding:
    settings = _current()
    finding = Finding("address", f"http://{settings.host}:{settings.port}")
    try:
        with socket.create_connection((settings.host, settings.port), timeout=1):
            finding.text += ", where something answers already"
    except OSError:
        finding.text += ", which is free"
    return finding


def _pairs() -> Finding:
    states = (f"{name}: {pair_state(name, row)}" for name, row in read_pairs(NAMED_PAIRS).items())
    return Finding("pairs", "; ".join(states))
