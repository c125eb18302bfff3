"""The work of `mlx-specprefill bench`: time to first token of a pair on this machine, sparse against full.

Both arms run through the engine as requests do, alternating, on the same real text. The figures are medians over the
repetitions. The record has every repetition.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from importlib.metadata import version
from itertools import chain
from pathlib import PurePath
from pydoc_data.topics import topics
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mlx_specprefill import (
    BLAS,
    DtypeName,
    Engine,
    Failed,
    Finished,
    GenerationRequest,
    ModelPair,
    PrefillReport,
    SparseUnsupportedError,
    SpecPrefillError,
    SpecPrefillOptions,
    as_token_ids,
    machine,
)

from ..pairs import Pair, short_name
from ..settings.server import Settings
from .bench import LENGTHS
from .common import notes
from .loading import load as load_models

FORMAT = 1  # the record's format; it increases when a field changes its meaning
WARM_UP = 512  # tokens of a warm-up prompt, which is not counted
ANSWER = 16  # tokens after each prefill, for the decoding speed
_PIECE = 4000  # characters per tokenizer call
_STRIDE = 50_021  # characters between the starts of two repetitions' prompts
_BUSY = 0.5  # share of the cores


class BenchmarkError(SpecPrefillError):
    """There is nothing to compare, or a request failed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Prompt lengths in tokens. Each is read `repeats` times in full and sparsely, keeping the share `keep` of its
    chunks.
    """

    lengths: tuple[int, ...]
    keep: Fraction
    repeats: int

    @property
    def requests(self) -> int:
        return 2 * (len(self.lengths) * self.repeats + 1)


@dataclass(frozen=True, slots=True)
class Run:
    """One repetition at one length."""

    tokens: int
    full: PrefillReport
    sparse: PrefillReport


def measure(engine: Engine, plan: Plan, done: Callable[[], None] = lambda: None) -> list[Run]:
    """Measure every repetition, shortest prompts first. Call `done` after each request.

    Raises:
        BenchmarkError: this pair can't be prefilled sparsely, or a request failed.
    """
    text = "\n\n".join(topics.values())
    runs = []
    warm_up = Plan((WARM_UP,), plan.keep, 1)
    for part in (warm_up, plan):
        for tokens in sorted(part.lengths):
            for number in range(part.repeats):
                runs.append(
                    _repetition(engine, _prompt(engine, text, tokens, number), part.keep, number % 2 == 1, done)
                )
    return runs[1:]


def _prompt(engine: Engine, text: str, tokens: int, number: int) -> list[int]:
    """Return a prompt of so many tokens, from another part of the text for every repetition."""
    ids: list[int] = []
    starts = range(number * _STRIDE % len(text), len(text), _PIECE)
    for start in chain(starts, range(0, len(text), _PIECE)):
        if len(ids) >= tokens:
            return ids[:tokens]
        ids += engine.pair.tokenizer.encode(text[start : start + _PIECE], add_special_tokens=False)
    raise BenchmarkError(f"this machine's Python has not enough text for a prompt of {tokens} tokens")


def _repetition(engine: Engine, prompt: list[int], keep: Fraction, sparse_first: bool, done: Callable[[], None]) -> Run:
    reports = {}
    for enabled in (True, False) if sparse_first else (False, True):
        reports[enabled] = _prefill(engine, prompt, SpecPrefillOptions(enabled, keep if enabled else None))
        done()
    if reports[True].mode != "sparse":
        raise BenchmarkError(f"the prompt of {len(prompt)} tokens was read in full: {reports[True].reason}")
    return Run(len(prompt), reports[False], reports[True])


def _prefill(engine: Engine, prompt: list[int], options: SpecPrefillOptions) -> PrefillReport:
    for event in engine.generate(GenerationRequest(as_token_ids(prompt), ANSWER, specprefill=options)):
        if isinstance(event, Failed):
            raise BenchmarkError(f"a prompt of {len(prompt)} tokens failed: {event.error}") from event.error
        if isinstance(event, Finished):
            return event.report
    raise BenchmarkError("the engine stopped")


def record(engine: Engine, pair: str, plan: Plan, runs: Sequence[Run], load: float | None) -> dict[str, Any]:
    """Return the figures that can be compared across machines. Nothing names a person, a host or a folder."""
    return {
        **measured_here(load),
        "pair": {
            "name": short_name(pair),
            "target": short_name(engine.pair.target_id),
            "draft": short_name(str(engine.pair.draft_id)),
            "dtype": engine.pair.dtype,
        },
        "keep": float(plan.keep),
        "wired_gb": round(engine.wired / 2**30, 1),
        "repeats": plan.repeats,
        "rows": [_row([run for run in runs if run.tokens == tokens]) for tokens in sorted(plan.lengths)],
    }


def measured_here(load: float | None) -> dict[str, Any]:
    """Return the fields at the start of every record: format, date, machine with its load average, and software."""
    host = machine()
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {
            "name": host.name,
            "device": host.device,
            "cores": host.cores,
            "memory_gb": None if host.memory is None else round(host.memory / 2**30, 1),
            "system": f"{platform.system()} {platform.machine()}",
            "load": load,
            "busy": is_busy(load),
        },
        "software": {
            **{name: version(name) for name in ("mlx-specprefill", "mlx", "mlx-lm")},
            "python": platform.python_version(),
            "blas": None if BLAS.library is None else PurePath(BLAS.library).name,
        },
    }


def _row(runs: Sequence[Run]) -> dict[str, Any]:
    full, sparse = ([_seconds(getattr(run, arm).timings.ttft_ms) for run in runs] for arm in ("full", "sparse"))
    times = [run.sparse.timings for run in runs]
    return {
        "tokens": runs[0].tokens,
        "kept_tokens": round(statistics.median(run.sparse.kept_tokens for run in runs)),
        "full_s": statistics.median(full),
        "sparse_s": statistics.median(sparse),
        "speedup": round(statistics.median(full) / statistics.median(sparse), 2),
        "full_runs_s": full,
        "sparse_runs_s": sparse,
        "draft_s": _seconds(statistics.median(each.draft_ms for each in times)),
        "select_s": _seconds(statistics.median(each.select_ms for each in times)),
        "prefill_s": _seconds(statistics.median(each.prefill_ms for each in times)),
    }


def _seconds(milliseconds: float) -> float:
    return round(milliseconds / 1e3, 4)


def is_busy(load: float | None) -> bool:
    """Return whether other work slows measurements down at this load average."""
    return load is not None and load > _BUSY * machine().cores


def load_average() -> float | None:
    """Return how many processes wanted a core in the last minute, None if the system doesn't say. Call it before
    measuring.
    """
    try:
        return round(os.getloadavg()[0], 1)
    except (OSError, AttributeError):
        return None


def measure_pair(
    chosen: Pair,
    dtype: DtypeName,
    settings: Settings,
    lengths: list[int] | None,
    repeats: int,
    load: float | None,
) -> dict[str, Any]:
    """Return the measurement of a pair, after showing its table.

    Args:
        load: the load average before.
    """
    loaded = load_models(chosen, dtype, settings, calibrate=True)
    plan = Plan(fitting_lengths(lengths, loaded), settings.specprefill_keep_pct, repeats)
    with Engine(loaded, settings.engine_config()) as engine:
        with Progress(console=notes(), transient=True) as bars:
            task = bars.add_task("Measuring", total=plan.requests)
            runs = measure(engine, plan, lambda: bars.advance(task))
        measured = record(engine, chosen.alias or loaded.target_id, plan, runs, load)
    Console().print(_table(measured))
    return measured


def fitting_lengths(lengths: list[int] | None, pair: ModelPair) -> tuple[int, ...]:
    """Return the requested prompt lengths, or the default ones that the pair can take.

    Raises:
        SparseUnsupportedError: it can't be prefilled sparsely; BenchmarkError: a length is too long for it.
    """
    longest = min(pair.context_length, pair.draft_context or pair.context_length) - 64
    if pair.draft is None or pair.sparse_refusal is not None:
        raise SparseUnsupportedError(pair.sparse_refusal or "no draft model is loaded")
    if lengths and max(lengths) > longest:
        raise BenchmarkError(f"--length {max(lengths)}: the pair takes {longest} tokens at most")
    return tuple(sorted(set(lengths or [length for length in LENGTHS if length <= longest] or [longest])))


def _table(measured: dict[str, Any]) -> Table:
    machine, keep = measured["machine"], measured["keep"]
    table = Table(show_edge=False)
    table.title = f"{measured['pair']['name']} on {machine['name']}, {machine['cores']} cores, keep {keep}"
    for name in ("tokens", "full s", "sparse s", "times sooner", "tokens read"):
        table.add_column(name, justify="right")
    for row in measured["rows"]:
        times = (f"{row['full_s']:.3g}", f"{row['sparse_s']:.3g}", f"{row['speedup']:.1f}")
        table.add_row(f"{row['tokens']:,}", *times, f"{row['kept_tokens']:,}")
    if machine["busy"]:
        table.caption = "The machine was busy: these times say little."
    return table
