"""The report of one request, frozen: how its prompt was read and why, how long each stage took, how it was drafted."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from .config import Scope
from .request import SpanKind

Mode = Literal["sparse", "full"]
ReportedMode = Literal["sparse", "full", "reuse"]
"""The third: a cached prompt that this one edits, with parts of it as they were read behind the old text."""
# The draft; a draft with another tokenizer; the target's own first layers; the request's own scores.
ScorerKind = Literal["draft", "mapped-draft", "self", "request"]
Stage = Literal["queued", "draft", "select", "prefill", "decode"]
MissKind = Literal["time", "counter", "tool_order", "reasoning", "edited", "template", "other"]
ReasonCode = Literal[
    "requested", "threshold", "predicted", "request", "policy", "fallback", "no-draft", "unsupported", "draft-context",
    "prompt-logprobs", "keep-all", "short", "forced", "everything", "no-question", "memory", "extended", "reused",
    "other",
]  # fmt: skip

_UNSTEADY = "predicted by times that change"
_UNITS = ((1e3, "s"), (6e4, "min"), (3.6e6, "h"))  # milliseconds


@dataclass(frozen=True, slots=True)
class Reason:
    """Says why a prompt is read in full or in part.

    Attributes:
        code: one of a short list, to be counted.
        words: for people, with the numbers.
    """

    code: ReasonCode
    words: str


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds of wall time per stage.

    Attributes:
        ttft_ms: from the engine's start on the request to its first token, without `queue_ms`; None: there was none.
    """

    queue_ms: float = 0.0
    draft_ms: float = 0.0  # draft prefill + look-ahead + scoring
    select_ms: float = 0.0
    prefill_ms: float = 0.0  # target prefill up to the first token
    ttft_ms: float | None = None
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Time to first token of both ways to prefill one prompt, milliseconds.

    Attributes:
        steady: false where such predictions have doubled or halved within the last minutes: nobody is told of them.
    """

    full_ms: float
    sparse_ms: float
    steady: bool = True

    @property
    def saving_ms(self) -> float:
        return self.full_ms - self.sparse_ms

    @property
    def words(self) -> str:
        return f"predicted {about(self.sparse_ms)} sparse, {about(self.full_ms)} full" if self.steady else _UNSTEADY

    def to_dict(self) -> dict[str, float]:
        return {"full_ms": round(self.full_ms, 3), "sparse_ms": round(self.sparse_ms, 3)}


def about(ms: float) -> str:
    """Return a predicted time in words, as exact as predictions are: one digit, or a half more below two."""
    unit, name = next(one for one in _UNITS if ms < one[0] * 90 or one is _UNITS[-1])
    value = max(ms / unit, 1e-3)
    digit = 10.0 ** math.floor(math.log10(value))
    step = digit / 2 if value < 2 * digit else digit
    return f"about {round(value / step) * step:.6g} {name}"


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """The drafting of the answer, with its reason.

    Attributes:
        strategy: "autoregressive", or the name of the one that ran.
        acceptance_rate: accepted share of the proposed tokens that were judged.
        tokens_per_step: of the answer, per forward of the target on its whole cache.
    """

    strategy: str
    reason: str
    acceptance_rate: float | None = None
    tokens_per_step: float | None = None

    def to_dict(self) -> dict[str, Any]:
        rates = ("acceptance_rate", "tokens_per_step")
        shown = {name: None if (value := getattr(self, name)) is None else round(value, 4) for name in rates}
        return {"strategy": self.strategy, "reason": self.reason, **shown}


def _rounded(times: Timings) -> dict[str, float | None]:
    return {name: None if ms is None else round(ms, 3) for name, ms in asdict(times).items()}


class Reached(NamedTuple):
    """The point at which a prefill was given up: its stage, and the tokens in the cache, cached ones too."""

    stage: Stage
    tokens: int


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """The place from which a prompt is read again although the cache holds what follows, behind another text.

    Attributes:
        token: index of the prompt's first token that differs from the cached prompt.
        message: index among the request's spans of the one that holds it, and `role`: its kind; None: none does.
        read_tokens: tokens behind the place that the cached prompt has, too, but those that are kept as they were read.
        before: up to 40 characters that both have in front of the difference.
        was, now: the cached prompt's and this prompt's text there, whole words, up to 40 characters. `was` is None
            where the cached prompt may be another party's (`CacheLabel.is_of_one`).
    """

    kind: MissKind
    token: int
    message: int | None
    role: SpanKind | None
    read_tokens: int
    before: str
    was: str | None
    now: str


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """The prefill of the prompt, with its reason."""

    mode: ReportedMode
    reason: str
    prompt_tokens: int
    kept_tokens: int
    cached_tokens: int = 0
    kept_share: float | None = None  # of the prompt's tokens, forced ones included; None in full mode
    scorer: ScorerKind | None = None  # None in full mode
    recalled_tokens: int = 0  # tokens dropped by an earlier turn and read for this one
    timings: Timings = field(default_factory=Timings)
    predicted: Prediction | None = None  # before the prefill; None without measurements
    kept_spans: tuple[tuple[int, int], ...] | None = None
    speculation: SpeculationReport | None = None  # None: not requested
    scoring: str | None = None  # rule and input of the scorer
    scope: Scope | None = None  # the text that competed; None in full mode
    draft_tokens: int = 0  # uncached tokens of the prompt, in the draft's tokenizer
    miss: PrefixMiss | None = None  # None: nothing that the cache holds was read again
    reason_code: ReasonCode = "other"  # of `reason`
    reached: Reached | None = None  # None: the prompt was read to its end
    estimated_tokens: int = 0  # tokens whose keys and values are estimated; the others that are not kept are absent
    reused_tokens: int = 0  # cached behind an edit, as they were read before it
    ended: str | None = None  # why the reader ended the answer before the engine did, where that was its own decision

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that clients get next to `usage`."""
        counts = (
            "prompt_tokens",
            "kept_tokens",
            "cached_tokens",
            "estimated_tokens",
            "recalled_tokens",
            "draft_tokens",
            "kept_share",
        )
        words = ("mode", "reason", *counts, "scorer", "scoring", "scope")
        report: dict[str, Any] = {name: getattr(self, name) for name in words}
        report["keep_pct"] = self.kept_share
        if self.mode == "reuse":
            report |= {"reused_tokens": self.reused_tokens, "read_tokens": self.kept_tokens - self.cached_tokens}
        report["timings"] = _rounded(self.timings)
        if self.predicted is not None and self.predicted.steady:
            report["predicted"] = self.predicted.to_dict()
        if self.speculation is not None:
            report["speculation"] = self.speculation.to_dict()
        if self.miss is not None:
            report["cache"] = {"miss": asdict(self.miss)}
        if self.reached is not None:
            report["reached"] = self.reached._asdict()
        if self.ended is not None:
            report["ended"] = self.ended
        if self.kept_spans is not None:
            report["kept_spans"] = [list(span) for span in self.kept_spans]
        return report
