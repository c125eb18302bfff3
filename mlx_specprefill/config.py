"""The library's settings and defaults: scoring, selection, when to go sparse, drafting, batch, memory, caches."""

from __future__ import annotations

from dataclasses import field
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass

from .errors import InvalidRequestError

_LONG_PROMPT = 8192  # tokens

SpeculationName = Literal["off", "ngram", "draft", "triforce", "mtp"]
SPECULATION_NAMES: tuple[SpeculationName, ...] = get_args(SpeculationName)
WiredLimit = Literal["auto", "on", "off"]
RuleName = Literal["default", "paper"]
RULE_NAMES: tuple[RuleName, ...] = get_args(RuleName)
Scope = Literal["user", "all"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Count = Annotated[int, Field(ge=1)]
# The ranges of sampling: OpenAI's where it has one.
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10, allow_inf_nan=False)]  # a factor


def keep_pct(value: float | int | str | Fraction, field_name: str = "specprefill_keep_pct") -> Fraction:
    """Return the share of chunks to keep as an exact rational in (0, 1].

    Floats go through their shortest decimal form, so 0.07 is 7/100 and not its binary neighbour: ceil(C * p) on
    the float would keep one chunk too many for some C.

    Raises:
        InvalidRequestError: not a number, or outside (0, 1].
    """
    try:
        share = Fraction(str(value)) if not isinstance(value, bool) else None
    except (ValueError, ZeroDivisionError):
        share = None
    if share is None or not 0 < share <= 1:
        raise InvalidRequestError(f"{field_name} must be a number in (0, 1], got {value!r}", field=field_name)
    return share


@dataclass(frozen=True, slots=True)
class DraftWindow:
    """The tokens that the draft sees while it reads a prompt up to the question; see `adapters/window`."""

    tokens: Count = 1024  # in front of a block
    sinks: Annotated[int, Field(ge=0)] = 64  # first tokens of the prompt
    block: Count = 512

    def whole(self, ring: int = 0) -> int:
        """Return the prompt's length up to which tokens see everything: blocks that hold `ring` tokens at least."""
        return -(-max(ring, self.sinks + self.tokens) // self.block) * self.block


@dataclass(frozen=True, slots=True)
class ScoringConfig:
    """Turns the draft's attention into one importance per prompt token."""

    rows: Count = 8  # paper: N, the last prompt token's row and look-ahead rows, which are averaged
    # The question is the last line or sentence of the last message, within these limits in tokens. Calibrated heads are
    # read there.
    question_rows: tuple[int, int] = (16, 48)
    pool_width: Count = 13  # taps of the zero-padded mean over neighbouring tokens; odd
    prefill_step: Count = 2048  # tokens per draft forward
    window: DraftWindow | None = field(default_factory=DraftWindow)  # None: the draft sees the whole prompt

    def __post_init__(self) -> None:
        if not 0 < self.question_rows[0] <= self.question_rows[1]:
            raise ValueError(f"question_rows must be two ascending positive numbers, got {self.question_rows}")
        if self.pool_width % 2 == 0:
            raise ValueError(f"pool_width must be odd, got {self.pool_width}")


@dataclass(frozen=True, slots=True)
class SelectionConfig:
    """Selects the tokens that the target sees. Limits are tokens."""

    chunk_size: Count = 8
    by_sentence: bool = True  # the chunks of one line or sentence are kept together; False: the paper
    sentence_limit: int = 96  # longer lines and sentences are cut into pieces of 32, each kept together
    # A chosen token that an earlier turn dropped is recalled if its importance is this multiple of the best unchosen
    # one (docs/decisions/0022).
    stands_out: float = 2.0
    max_forced_share: Fraction = Fraction(3, 5)  # above it a sparse prefill can't pay off: full prefill
    verbatim_system_limit: int = 16384  # system prompt and tool definitions are kept whole up to here


@dataclass(frozen=True, slots=True)
class SpecPrefillPolicy:
    """The server's policy for requests without `specprefill`."""

    enabled: bool = True
    threshold: int | None = 8192  # sparse only when the uncached suffix is longer (tokens); None: by predicted saving
    min_saving_share: Fraction = Fraction(1, 5)  # of the full prefill's time: it is lossy, so it must pay off
    min_saving_ms: float = 1000.0
    keep_pct: Fraction = Fraction(1, 5)
    # Tokens kept at least where the predicted saving decides: a fifth of a short prompt loses what is asked in other
    # words (docs/results.md), and saves little time.
    min_kept: int = 1024
    recall_share: Fraction = Fraction(1, 4)  # of the share kept of the old text: the most that is recalled
    densify: bool = True  # after a sparse turn, make its prompt dense in idle time
    on_battery: bool = False  # also while the machine runs on battery
    reuse: bool = True  # keep what follows an edit of a cached prompt
    # Estimate the keys and values of the tokens that rank next to those that are read, where the pair has a map. Off:
    # answers come nearer to those of full reading, but some right ones are lost (docs/results.md).
    estimate: bool = False
    # The text that competes: "user" for users, tools and earlier turns, "all" also for a long system text except its
    # ends.
    scope: Scope = "user"

    def estimates(self, asked: bool | None) -> bool:
        """Return whether what is not read is estimated, by a request's word or this policy."""
        return self.estimate if asked is None else asked

    @property
    def long_prompt(self) -> int:
        """Return the tokens above which a prompt counts as long without measurements."""
        return _LONG_PROMPT if self.threshold is None else self.threshold


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Drafting and verification of answers. It changes only an answer's speed, never its distribution.

    The numbers of tokens are small because a forward of several rows is not free on Apple GPUs: four rows of a 4-bit
    model cost about 1.1 to 1.6 times one, eight 1.7 to 2.7 times.
    """

    strategy: SpeculationName = "off"  # default of requests
    gamma: Count = 3  # tokens that the draft model or the MTP head proposes at a time
    gamma1: Count = 2  # triforce: tokens of the small model per inner verification
    gamma2: Count = 4  # triforce: tokens per verification on the whole cache
    budget: int = 4096  # tokens of the retrieved part of the cache
    chunk: Count = 16  # tokens per retrieved chunk
    sinks: Annotated[int, Field(ge=0)] = 16  # first tokens of the prompt that triforce's small model reads
    window: Count = 1024  # last tokens of the prompt that it reads
    ngram: Count = 8  # tokens proposed at a time from an earlier match
    ngram_match: Count = 3  # last tokens that have to match

    def __post_init__(self) -> None:
        if self.budget < 4 * self.chunk:
            raise ValueError(f"a budget of {self.budget} tokens is less than four chunks of {self.chunk}")


def _own_prefill_step() -> int:
    """Return the tokens per forward that suit this device. Settings are read and refused before mlx is imported."""
    mx = import_module("mlx.core")
    return 2048 if mx.default_device() == mx.Device(mx.gpu) else 128


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's configuration."""

    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    rule: RuleName = "default"  # default of requests: scoring and selection of tokens
    policy: SpecPrefillPolicy = field(default_factory=SpecPrefillPolicy)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    # Tokens per forward at most; a cancelled request stops within one such chunk, of some two seconds. 2048 on a GPU.
    # MLX's CPU attention computes the whole square of a chunk, masked or not, so 128 is a quarter faster there.
    prefill_step: Count = field(default_factory=_own_prefill_step)
    max_queue: Count = 256  # requests waiting to be admitted
    max_rows: Count = 32  # requests that prefill or decode at the same time
    target_itl_ms: float = 200.0  # a prefill chunk may delay running answers by this much
    memory_limit: int | None = None  # bytes for weights, sequences and caches; None: what the device recommends
    wired_limit: WiredLimit = "auto"  # memory that macOS keeps resident: see docs/guides/mac.md
    # Memory for prefixes; None: a quarter of what weights and one long request leave, at least 2 GB; 0 turns them off.
    prefix_cache_bytes: int | None = None
    prefix_cache_dir: Path | None = None  # folder of prefixes that survive a restart
    prefix_cache_optional: bool = False  # True: run without that folder if it can't be used
    prefix_disk_bytes: int = 20 << 30
    # Only prefixes that several requests share, up to the end of the system prompt and the tools, are written there.
    prefix_disk_pinned_only: bool = False
    calibration_file: Path | None = None  # file of measured costs that survives a restart
    fits_folder: Path | None = None  # folder of maps that are fitted in idle time; None: none is fitted
    kv_bits: int | None = None  # quantise the target's KV cache after prefill (plain attention caches only)

    def __post_init__(self) -> None:
        if self.kv_bits not in (None, 2, 3, 4, 5, 6, 8):
            raise ValueError(f"kv_bits must be one of 2, 3, 4, 5, 6, 8, got {self.kv_bits}")
