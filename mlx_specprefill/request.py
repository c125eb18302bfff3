"""The types that cross the thread boundary: the frozen request, and the frozen events.

The engine is token-only. The caller that renders the chat template adds the messages' ranges (`PromptSpan`), so that
the engine can keep the template's structure without knowing any template.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from itertools import takewhile
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .config import RuleName, Scope, SpecPrefillPolicy, SpeculationConfig, SpeculationName
from .errors import InvalidRequestError

Mode = Literal["sparse", "full"]
# The draft; a draft with another tokenizer; the target's own first layers; the request's own scores.
ScorerKind = Literal["draft", "mapped-draft", "self", "request"]
Stage = Literal["queued", "draft", "select", "prefill", "decode"]
FinishReason = Literal["stop", "length", "cancelled"]
SpanKind = Literal["system", "tools", "user", "assistant", "tool", "other"]
_LABEL_PART = re.compile(r"[\w-]{0,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class CacheLabel:
    """Owner and salt of cached prefixes. A prefix is found and listed only under its own label.

    Attributes:
        owner: prefixes are listed and dropped by owner.
        salt: separates some of an owner's prefixes from the others.

    Both are empty or up to 64 letters, digits, underscores and hyphens. They are written into cache folders, so a
    secret must come as a digest.
    """

    owner: str = ""
    salt: str = ""

    def __post_init__(self) -> None:
        for name, part in (("owner", self.owner), ("salt", self.salt)):
            if not _LABEL_PART.fullmatch(part):
                raise ValueError(f"{name} must be at most 64 letters, digits, _ and -, got {part!r:.80}")


SHARED = CacheLabel()  # default label of requests


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """OpenAI's sampling fields and those of mlx-lm, llama.cpp and vLLM. temperature 0 is greedy.

    Attributes:
        typical_p: locally typical sampling keeps the tokens whose surprise is nearest to the entropy, up to this mass.
        xtc_probability: how often all tokens of at least `xtc_threshold` but the least likely one of them are excluded;
            never `xtc_special_tokens`.
        bad_words: token sequences that are not completed.
        allowed_token_ids: nothing else is generated; None: everything may be.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class SpecPrefillOptions:
    """The request's options for drafts, for its prompt and for its answer.

    Attributes:
        enabled: True forces it, False turns it off, None: server policy.
        keep_pct: share of chunks to keep, in (0, 1]; None: server policy.
        return_spans: report which prompt indices the target saw.
        rule: scoring and selection of tokens; None: the server's.
        importance: the caller's own scores, float32 (M,), finite, in place of the draft's.
        speculative: how the answer is drafted; None: as the server does. The answer's distribution stays the same, but
            for rounding in half precision.
        scope: the text that competes, as in `SpecPrefillPolicy.scope`; None: server policy.
        verify: compare a sparse answer with full reading, in idle time.
    """

    enabled: bool | None = None
    keep_pct: Fraction | None = None
    return_spans: bool = False
    rule: RuleName | None = None
    importance: npt.NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    speculative: SpeculationName | None = None
    scope: Scope | None = None
    verify: bool = False

    def strategy(self, config: SpeculationConfig) -> SpeculationName:
        """Return how the answer is drafted, by the request's word or the server's."""
        return self.speculative or config.strategy


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that the answer must follow.

    Attributes:
        grammar: llguidance's: a Lark text, or its JSON form ("{...").
        field: request field that errors name.
        starts_after: the generated tokens that the grammar's text follows, such as the end of reasoning; until they
            have come, nothing is masked. Empty: from the first token on.
    """

    grammar: str
    field: str = "response_format"
    starts_after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """A limit on the reasoning of an answer.

    Attributes:
        tokens: of reasoning, >= 0. Then `closing` follows, and no reasoning is opened again.
        start: the generated tokens that open reasoning; `end`: those that close it.
        closing: tokens, beginning with `end`.
        opened: the prompt has opened it.
    """

    tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    closing: tuple[int, ...]
    opened: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        prompt: M >= 1 token ids, int32 (M,); any sequence of ints is converted.
        max_tokens: tokens to generate, >= 0 (0 only makes sense with `prompt_logprobs`).
        stop_token_ids: ids that end the answer (not emitted as text; the event still carries them).
        logprobs: None, or how many alternatives per generated token (0..20) to report.
        prompt_logprobs: None, or as `logprobs` for the prompt's own tokens (echo); forces a full prefill.
        spans: the rendered messages in prompt order, empty for a raw completion.
        constraint: None, or the grammar of the generated text.
        reasoning: None, or the budget of reasoning tokens.
        min_tokens: number of tokens before stop ids may be generated, unless the constraint leaves nothing else.
        label: cached prefixes and sessions are shared with requests of the same label.
        pin_system_prefix: pin the system prefix in the cache at once, as if a second request had used it.
        made: when it came, by the monotonic clock. What came before `Engine.drop_cached` leaves nothing in the caches.
    """

    prompt: TokenIds
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    specprefill: SpecPrefillOptions = field(default_factory=SpecPrefillOptions)
    spans: tuple[PromptSpan, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    reasoning: ReasoningBudget | None = None
    min_tokens: int = 0
    label: CacheLabel = SHARED
    pin_system_prefix: bool = False
    made: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", as_token_ids(self.prompt))

    @property
    def system_prefix_len(self) -> int:
        """Return the tokens of the system prompt and the tools in front, which the sessions of one agent share."""
        messages = takewhile(lambda span: span.kind in ("system", "tools"), self.spans)
        return max((span.end for span in messages), default=0)

    @property
    def usable_prefix(self) -> int:
        """Return the number of cached prompt tokens that the request may resume from.

        The last token must be fed for its logits. A request that forces sparse prefill means its newest message: the
        kept tokens must not depend on whether an earlier request left a dense copy.
        """
        if self.prompt_logprobs is not None:
            return 0
        if self.specprefill.enabled:
            return self.spans[-1].start if self.spans else 0
        return len(self.prompt) - 1


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds of wall time per stage; ttft_ms runs from the engine's start on the request to its first token."""

    queue_ms: float = 0.0
    draft_ms: float = 0.0  # draft prefill + look-ahead + scoring
    select_ms: float = 0.0
    prefill_ms: float = 0.0  # target prefill up to the first token
    ttft_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Time to first token of both ways to prefill one prompt, milliseconds."""

    full_ms: float
    sparse_ms: float

    @property
    def saving_ms(self) -> float:
        return self.full_ms - self.sparse_ms

    def pays(self, policy: SpecPrefillPolicy) -> bool:
        """Return whether the predicted saving exceeds both margins of the policy."""
        enough = self.saving_ms >= policy.min_saving_ms
        return enough and self.saving_ms >= float(policy.min_saving_share) * self.full_ms


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """The drafting of the answer, with its reason.

    Attributes:
        strategy: "autoregressive", or the name of the one that ran.
        acceptance_rate: accepted share of the proposed tokens that were judged; of the level below: `inner_...`.
        tokens_per_step: of the answer, per forward of the target on its whole cache.
    """

    strategy: str
    reason: str
    acceptance_rate: float | None = None
    inner_acceptance_rate: float | None = None
    tokens_per_step: float | None = None

    def to_dict(self) -> dict[str, Any]:
        rates = ("acceptance_rate", "inner_acceptance_rate", "tokens_per_step")
        shown = {name: None if (value := getattr(self, name)) is None else round(value, 4) for name in rates}
        return {"strategy": self.strategy, "reason": self.reason, **shown}


def _rounded(times: Timings | Prediction) -> dict[str, float]:
    return {name: round(ms, 3) for name, ms in asdict(times).items()}


MissKind = Literal["time", "counter", "tool_order", "reasoning", "edited", "template", "other"]


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """The place from which a prompt is read again although the cache holds what follows, behind another text.

    Attributes:
        token: index of the prompt's first token that differs from the cached prompt.
        message: index among the request's spans of the one that holds it, and `role`: its kind; None: none does.
        read_tokens: tokens behind the place that the cached prompt has, too.
        before: up to 40 characters that both have in front of the difference.
        was, now: the cached prompt's and this prompt's text there, whole words, up to 40 characters. `was` is None
            unless the cached prompt is an earlier turn of the same conversation: it may be another person's.
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

    mode: Mode
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

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that clients get next to `usage`."""
        counts = ("prompt_tokens", "kept_tokens", "cached_tokens", "recalled_tokens", "draft_tokens", "kept_share")
        words = ("mode", "reason", *counts, "scorer", "scoring", "scope")
        report: dict[str, Any] = {name: getattr(self, name) for name in words}
        report["keep_pct"] = self.kept_share
        report["timings"] = _rounded(self.timings)
        if self.predicted is not None:
            report["predicted"] = _rounded(self.predicted)
        if self.speculation is not None:
            report["speculation"] = self.speculation.to_dict()
        if self.miss is not None:
            report["cache"] = {"miss": asdict(self.miss)}
        if self.kept_spans is not None:
            report["kept_spans"] = [list(span) for span in self.kept_spans]
        return report


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of one token under the target's unmodified distribution."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Work done inside a stage, in tokens (`done` of `total`).

    Attributes:
        cached: prompt tokens that the target need not read, besides those `total`; None while that is not known.
    """

    stage: Stage
    done: int
    total: int
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Entry i belongs to prompt token i+1: (its own logprob, the best alternatives). M-1 entries."""

    entries: tuple[tuple[Logprob, tuple[Logprob, ...]], ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. `logprob` and `top_logprobs` are set if the request asked for them.

    `logprob` is also set if the answer will be verified.
    """

    token: int
    logprob: float | None = None
    top_logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that did not fail."""

    reason: FinishReason
    completion_tokens: int
    report: PrefillReport


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that failed. The engine goes on with the next one."""

    error: Exception
    report: PrefillReport | None = None


Event = Progress | PromptLogprobs | TokenEvent | Finished | Failed


TokenIds = npt.NDArray[np.int32]


def as_token_ids(ids: Sequence[int] | TokenIds) -> TokenIds:
    """Return token ids as one read-only int32 array (M,). An int32 array is not copied.

    Raises:
        InvalidRequestError: an id that no vocabulary has.
    """
    try:
        tokens = np.asarray(ids, dtype=np.int32)
    except OverflowError:
        raise InvalidRequestError("the prompt has token ids outside the vocabulary", field="prompt") from None
    if tokens.flags.writeable:
        tokens = tokens.view()
        tokens.flags.writeable = False
    return tokens


def concat_tokens(prompt: TokenIds, answer: Sequence[int]) -> TokenIds:
    """Return the prompt's token ids followed by those of its answer."""
    return np.concatenate([prompt, np.asarray(answer, dtype=np.int32)])


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """One rendered message: prompt indices of the whole message and of its content, both [start, end).

    `start..content_start` is the role header, `content_end..end` the end-of-turn marker. Tool definitions that the
    template puts into the system message belong to it, or form a span of kind "tools".
    """

    kind: SpanKind
    start: int
    content_start: int
    content_end: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.content_start <= self.content_end <= self.end:
            raise ValueError(f"span bounds must be ordered: {self}")


_Z = 1.96  # standard errors of a 95 % interval
_Floats = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int32]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """A comparison of an answer of T tokens with full reading. All arrays are (T,); empty without a comparison.

    Attributes:
        reason: why there is no comparison; empty with one.
        tokens: int32, those of the answer.
        is_sampled: the tokens were drawn, not the likeliest ones.
        agrees: bool. The token is full reading's own choice; of a sampled answer, full reading could have drawn it.
        counted: bool. A grammar or budget did not decide on the token: more than one was allowed, and full reading's
            favourite was among them.
        own: int32, full reading's own choices under the request's penalties and grammar.
        full, own_full: natural-log probabilities under full reading, of the tokens and of `own`, before temperature,
            penalties and filters.
        sparse: those of the tokens under sparse reading.
    """

    reason: str = ""
    is_sampled: bool = False
    tokens: _Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    agrees: _Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    counted: _Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    own: _Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    full: _Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    own_full: _Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    sparse: _Floats = field(default_factory=lambda: np.zeros(0, np.float32))

    def of_first(self, count: int) -> Verdict:
        """Return the verdict on the answer's first `count` tokens: what follows a stop string is no part of it."""
        names = ("tokens", "agrees", "counted", "own", "full", "own_full", "sparse")
        return replace(self, **{name: getattr(self, name)[:count] for name in names})

    @property
    def word(self) -> Literal["same", "differs", "unknown"]:
        if self.why_unknown:
            return "unknown"
        if self.first is not None:
            return "differs"
        low, high = self.interval
        return "same" if not self.is_sampled or low <= 0 <= high else "differs"

    @property
    def why_unknown(self) -> str:
        return self.reason or ("" if self.counted.any() else "no token was the model's own choice")

    @property
    def first(self) -> int | None:
        """Return the first counted token on which they disagree."""
        found = np.flatnonzero(self.counted & ~self.agrees)
        return int(found[0]) if found.size else None

    @property
    def nll_full(self) -> float:
        """Return the mean negative log-likelihood of the counted tokens under full reading, nats per token."""
        return -float(self.full[self.counted].mean())

    @property
    def nll_sparse(self) -> float:
        """Return the same under sparse reading."""
        return -float(self.sparse[self.counted].mean())

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the counted tokens' mean log-ratio, full to sparse. One token has no bounds."""
        ratios = self.full[self.counted].astype(np.float64) - self.sparse[self.counted]
        if ratios.size < 2:
            return -math.inf, math.inf
        half = _Z * float(ratios.std(ddof=1)) / math.sqrt(ratios.size)
        return float(ratios.mean()) - half, float(ratios.mean()) + half
