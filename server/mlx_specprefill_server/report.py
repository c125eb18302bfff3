"""The parts of a response about how it was made: usage, timings, warnings, the prefill report as JSON, progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from mlx_specprefill import EngineError, PrefillReport, Progress, SpecPrefillError, Timings

from .deltas import AnswerDone
from .generation.generation import Generation
from .http.errors import ApiError, api_error

PROGRESS_S = 2.0  # seconds of prefill between two reports of a stream


class Report:
    """The ends of all answers of one response."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._ends: dict[int, AnswerDone] = {}

    def add(self, end: AnswerDone, index: int = 0) -> bool:
        """Add the end of answer `index`. Return whether it was the last one."""
        self._ends[index] = end
        return len(self._ends) == len(self._generation.prompts)

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts together."""
        return sum(map(len, self._generation.prompts[:: self._generation.copies]))

    @property
    def completion_tokens(self) -> int:
        return sum(end.completion_tokens for end in self._ends.values())

    @property
    def reasoning_tokens(self) -> int:
        return sum(end.reasoning_tokens for end in self._ends.values())

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens from the cache, for the first answer of each prompt."""
        return sum(report.cached_tokens for report in self._reports())

    @property
    def error(self) -> SpecPrefillError | ApiError | None:
        """The first failure. An error of another package becomes an EngineError."""
        failed = next((end.error for end in self._ends.values() if end.error is not None), None)
        if failed is None or isinstance(failed, SpecPrefillError | ApiError):
            return failed
        error = EngineError(f"the engine failed on this request: {failed}")
        error.__cause__ = failed
        return error

    def raise_error(self) -> None:
        """Raise the first failure, for responses whose status is still open."""
        if (error := self.error) is not None:
            raise error

    def specprefill(self) -> dict[str, Any]:
        """Return the report of the prefill, which clients get next to `usage`."""
        report = _merge(self._reports()).to_dict()
        tools, tokens = self._generation.deferred
        if tools:
            report["deferred"] = {"tools": tools, "tokens": tokens}
        return report

    def prefill_fields(self) -> dict[str, Any]:
        """Return the report and, if there are some, the warnings, as fields of a response."""
        warnings = [*self._generation.warnings, *(text for end in self._ends.values() for text in end.warnings)]
        return {"specprefill": self.specprefill()} | ({"warnings": warnings} if warnings else {})

    def timings(self) -> dict[str, Any]:
        """Return llama.cpp's timings object."""
        report = _merge(self._reports())
        times = report.timings
        prompt_ms = times.draft_ms + times.select_ms + times.prefill_ms
        return {
            "cache_n": report.cached_tokens,
            **_rates("prompt", 0 if report.reached else report.prompt_tokens - report.cached_tokens, prompt_ms),
            **_rates("predicted", self.completion_tokens, times.decode_ms),
        }

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object. It counts the full prompt, whatever the target read of it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def items_usage(self, questions: int = 0) -> dict[str, Any]:
        """Return the usage object of OpenAI's responses. `questions` are tokens of the input beside the prompts."""
        read = self.prompt_tokens + questions
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": read + self.completion_tokens,
        }

    def extras(self) -> dict[str, Any]:
        """Return the report, the timings, and the error, if there is one."""
        extras = self.prefill_fields() | {"timings": self.timings()}
        return extras | ({} if self.error is None else {"engine_error": api_error(self.error).body()["error"]})

    def _reports(self) -> list[PrefillReport]:
        """Return one report per prompt. Copies of an answer decode side by side after one prefill."""
        ends = [self._ends[index] for index in sorted(self._ends)]
        copies = self._generation.copies
        return [_first(ends[i : i + copies]) for i in range(0, len(ends), copies)]


def _first(ends: Sequence[AnswerDone]) -> PrefillReport:
    report = ends[0].report
    longest = max(end.report.timings.decode_ms for end in ends)
    return replace(report, timings=replace(report.timings, decode_ms=longest))


def _merge(reports: Sequence[PrefillReport]) -> PrefillReport:
    """Return one report of several prompts, with sums of counts and times."""
    if len(reports) == 1:
        return reports[0]
    mode = max((report.mode for report in reports), key=("full", "reuse", "sparse").index)
    prompt_tokens = sum(report.prompt_tokens for report in reports)
    kept_tokens = sum(report.kept_tokens for report in reports)
    times = {f.name: sum(getattr(report.timings, f.name) or 0.0 for report in reports) for f in fields(Timings)}
    return replace(
        reports[0],
        mode=mode,
        reason="; ".join(dict.fromkeys(report.reason for report in reports)),
        prompt_tokens=prompt_tokens,
        kept_tokens=kept_tokens,
        cached_tokens=sum(report.cached_tokens for report in reports),
        recalled_tokens=sum(report.recalled_tokens for report in reports),
        reused_tokens=sum(report.reused_tokens for report in reports),
        draft_tokens=sum(report.draft_tokens for report in reports),
        kept_share=None if mode == "full" else kept_tokens / prompt_tokens,
        timings=Timings(**times),
        kept_spans=None,
        miss=next((report.miss for report in reports if report.miss is not None), None),
    )


def _rates(name: str, count: int, ms: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": round(ms, 3),
        f"{name}_per_token_ms": round(ms / count, 3) if count else 0.0,
        f"{name}_per_second": round(count / ms * 1000, 3) if ms else 0.0,
    }


class ProgressReporter:
    """A choice of the prefill steps that one stream reports.

    A client that asked for progress gets every step. Other clients get one step per PROGRESS_S seconds, as a sign of
    life with an estimate of the remaining time.

    Args:
        wanted: whether the client asked for progress.
        clock: seconds; for tests.
    """

    def __init__(self, wanted: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.wanted, self._clock = wanted, clock
        self._started = clock()
        self._due: float | None = None  # None: the engine has not begun

    def report(self, event: Progress) -> dict[str, Any] | None:
        """Return llama.cpp's progress object, in which `processed` includes `cache`, or None if the stream shows none.

        No event precedes the first one that counts cached tokens. `stage` names the model: the draft reads the whole
        prompt, the target the cached and the selected tokens.
        """
        now = self._clock()
        if self._due is None:
            self._due = now + PROGRESS_S
        if event.cached is None or not (self.wanted or now >= self._due):
            return None
        self._due = now + PROGRESS_S
        cached = event.cached
        if event.stage == "prefill":
            total, processed = event.total + cached, event.done + cached
        else:
            total, processed = event.total, max(event.done, cached)
        elapsed = round(1e3 * (now - self._started))
        return {"total": total, "cache": cached, "processed": processed, "time_ms": elapsed, "stage": event.stage}
