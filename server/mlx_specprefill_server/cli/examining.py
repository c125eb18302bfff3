"""`mlx-specprefill doctor`: the installation, its machine, the problems, and their remedies."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from mlx_specprefill import BLAS, machine, resolve_model_path

from .. import __version__
from ..pairs import NAMED_PAIRS, PairsError, find_pair, pair_state, read_pairs, size
from ..settings import ENV_PREFIX, Settings, unknown_variables, what_is_wrong
from .common import FAILED, OptionError, one_line_errors
from .computing import compute as compute_checks

__all__ = ["Finding", "doctor", "examine"]

_SECRETS = ("API_KEYS", "ADMIN_KEYS")
_SHOWN = ("mlx", "mlx-lm", "transformers", "numpy", "llguidance", "fastapi")
_LOW_MEMORY = 4 << 30  # bytes; with less, only the bundled pair fits comfortably
_OLDEST_MACOS = 14  # the oldest macOS that MLX has wheels for


@dataclass(slots=True)
class Finding:
    """One checked part: its description, and its problems, each with a remedy."""

    name: str
    said: str
    problems: list[str] = field(default_factory=list)


def doctor(
    compute: Annotated[
        bool,
        typer.Option("--compute", help="Compare results of tiny models on this device with known ones."),
    ] = False,
    target: Annotated[str | None, typer.Option(help="With --compute: time forward passes of this model.")] = None,
    file: Annotated[Path | None, typer.Option("--json", help="With --compute: write the record to this file.")] = None,
) -> None:
    """Print the machine, the installation, the models and the settings, and each problem with its remedy.

    Ends with status 1 where something is wrong. Loads no model but --target's and needs no network.
    """
    with one_line_errors():
        if not compute and (target or file):
            raise OptionError("--target and --json belong to --compute")
        wrong = _print_findings()
        if compute:
            wrong = not compute_checks(target, file) or wrong
    if wrong:
        raise typer.Exit(FAILED)


def _print_findings() -> bool:
    """Print the findings. Return whether there is a problem."""
    findings = list(examine())
    table = Table(show_edge=False, show_header=False, pad_edge=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(finding.name, finding.said)
    console = Console()
    console.print(table, markup=False, highlight=False)
    problems = [problem for finding in findings for problem in finding.problems]
    typer.echo("\nNothing is wrong." if not problems else "\nWhat is wrong:")
    for problem in problems:
        typer.echo(f"- {problem}")
    return bool(problems)


def examine() -> Iterator[Finding]:
    """Yield the finding of each part, one after the other."""
    parts: tuple[Callable[[], Finding], ...] = (
        _program,
        _machine,
        _memory,
        _weights,
        _blas,
        _versions,
        _settings,
        _cache,
        _address,
        _pairs,
    )
    for part in parts:
        yield part()


def _program() -> Finding:
    said = f"mlx-specprefill {__version__}, Python {platform.python_version()} ({sys.executable})"
    return Finding("program", said)


def _machine() -> Finding:
    found = machine()
    on_mac = sys.platform == "darwin"
    system = f"macOS {platform.mac_ver()[0]}, {platform.machine()}" if on_mac else platform.platform()
    said = f"{found.device}: {found.name}, {found.cores} cores; {system}"
    return Finding("machine", said, list(_mac_problems(found.has_metal)) if on_mac else [])


def _mac_problems(has_metal: bool) -> Iterator[str]:
    release = platform.mac_ver()[0]
    if int(release.partition(".")[0] or 0) < _OLDEST_MACOS:
        yield f"MLX needs macOS {_OLDEST_MACOS} or newer, this is {release}"
    if platform.machine() != "arm64":
        yield "this Python is made for Intel processors, where MLX has no GPU: install one for arm64"
    if not has_metal:
        yield "MLX found no Metal device: everything runs on the processor, many times slower"


def _memory() -> Finding:
    found = machine()
    if found.memory is None:
        return Finding("memory", "unknown; set --memory-limit")
    limit = f", {size(found.memory_limit)} for weights, requests and caches" if found.memory_limit else ""
    wired = f"; wired limit {_current().wired_limit}{_wired_limit()}"
    finding = Finding("memory", f"{size(found.memory)}{limit}{wired}")
    if found.memory < _LOW_MEMORY:
        finding.problems.append(f"{size(found.memory)} of memory are enough for the pairs demo and smollm2 only")
    return finding


def _wired_limit() -> str:
    """Return the memory that macOS lets the GPU wire, "" on other systems."""
    if sys.platform != "darwin":
        return ""
    asked = ("/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb")
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "; iogpu.wired_limit_mb is not known"
    return f"; iogpu.wired_limit_mb {found}{' (the default of macOS)' if found == '0' else ''}"


def _weights() -> Finding:
    """Return the size of each downloaded pair's weight files."""
    memory, found = machine().memory, []
    for name in read_pairs(NAMED_PAIRS):
        try:
            pair = find_pair(name)
        except PairsError:
            continue
        places = [resolve_model_path(model) for model in (pair.target, pair.draft) if model not in (None, "self")]
        weights = sum(_weight_bytes(place) for place in places if place is not None)
        share = f" ({weights / memory:.1%} of memory)".replace("%", " %") if memory else ""
        found += [f"{name} {size(weights)}{share}"] if None not in places else []
    return Finding("weights", ", ".join(found) or "no pair is on this machine")


def _weight_bytes(place: Path) -> int:
    files = [place] if place.is_file() else place.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


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
        f"{need.name} {found or 'is missing'}, but {need.name}{need.specifier} is needed: "
        f'{sys.executable} -m pip install "{need.name}{need.specifier}"'
        for need in wanted
        if need.marker is None or need.marker.evaluate({"extra": ""})
        for found in [_installed_version(need.name)]
        if found is None or not need.specifier.contains(found, prereleases=True)
    ]
    return finding


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _settings() -> Finding:
    given = {name: value for name, value in sorted(os.environ.items()) if name.upper().startswith(ENV_PREFIX)}
    finding = Finding("settings", ", ".join(_shown(given)) or "no variables are set")
    finding.problems += [
        f"the environment variable {name} is no setting{f'; did you mean {nearest}?' if nearest else ''}"
        for name, nearest in unknown_variables().items()
    ]
    try:
        Settings()
    except ValidationError as error:
        finding.problems.append(what_is_wrong(error))
    return finding


def _shown(given: Mapping[str, str]) -> Iterator[str]:
    for name, value in given.items():
        yield f"{name}={'(hidden)' if name.upper().endswith(_SECRETS) else value}"


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
            finding.said += ", where something answers already"
    except OSError:
        finding.said += ", which is free"
    return finding


def _pairs() -> Finding:
    states = (f"{name}: {pair_state(name, row)}" for name, row in read_pairs(NAMED_PAIRS).items())
    return Finding("pairs", "; ".join(states))
