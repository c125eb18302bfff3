"""The frozen request: prompt, sampling, grammar, options of sparse prefill, cache label, and the messages' places.

The engine is token-only. The caller that renders the chat template adds the messages' ranges (`PromptSpan`), so that
the engine can keep the template's structure without knowing any template.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import takewhile
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from .arrays import Floats
from .config import (
    Penalty,
    Probability,
    RepetitionPenalty,
    RuleName,
    Scope,
    SpeculationConfig,
    SpeculationName,
    Temperature,
)
from .errors import InvalidRequestError

SpanKind = Literal["system", "tools", "user", "assistant", "tool", "other"]
_LABEL_PART = re.compile(r"[\w-]{0,64}", re.ASCII)
TokenIds = npt.NDArray[np.int32]
QUESTIONS_AT_ONCE = 1024  # tokens of questions that stand behind a prompt at a time, or one longer question


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

    @property
    def is_of_one(self) -> bool:
        """Return whether all that is cached under it is known to be one party's, who keeps its salt secret.

        Nothing else shows it. Many people may use one key. Common text does not make a conversation, however long it
        is: two may begin with the same words, get the same answer and go on about the same document.
        """
        return self.salt != ""


SHARED = CacheLabel()  # default label of requests


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """OpenAI's sampling fields and those of mlx-lm, llama.cpp and vLLM. temperature 0 is greedy."""

    temperature: Temperature = 0.0
    top_p: Probability = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0  # 0: off
    min_p: Probability = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


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
        estimate: estimate what is not read, as in `SpecPrefillPolicy.estimate`; None: server policy. With the caller's
            own scores only True does, because the draft has to read. Nothing is estimated by the published rule.
    """

    enabled: bool | None = None
    keep_pct: Fraction | None = None
    return_spans: bool = False
    rule: RuleName | None = None
    importance: Floats | None = field(default=None, compare=False, repr=False)
    speculative: SpeculationName | None = None
    scope: Scope | None = None
    verify: bool = False
    estimate: bool | None = None

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


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A short question behind the prompt, and its possible answers.

    Attributes:
        tokens: Q >= 1 token ids that follow the prompt's, int32 (Q,); any sequence of ints is converted.
        labels: the token ids of each answer, at least one. The probabilities are those of the first tokens where all of
            these differ, else of all tokens, by their mean log-probability.
    """

    tokens: TokenIds
    labels: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", as_token_ids(self.tokens))

    @property
    def first(self) -> list[int]:
        """Return the labels' first tokens."""
        return [label[0] for label in self.labels]

    @property
    def differs_at_once(self) -> bool:
        """Return whether the first tokens tell the labels apart."""
        return len(set(self.first)) == len(self.labels)

    @property
    def room(self) -> int:
        """Return the tokens that it takes behind the prompt at most."""
        return self.tokens.size + (0 if self.differs_at_once else sum(map(len, self.labels)))


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        prompt: M >= 1 token ids, int32 (M,); any sequence of ints is converted.
        max_tokens: tokens to generate; 0: the prompt is read and kept for later requests.
        stop_token_ids: ids that end the answer (not emitted as text; the event still carries them).
        logprobs: None, or how many alternatives per generated token (0..20) to report.
        prompt_logprobs: None, or as `logprobs` for the prompt's own tokens (echo); forces a full prefill.
        spans: the rendered messages in prompt order, empty for a raw completion.
        about_everything: the words of the question that ask for the whole prompt, as the report quotes them. It is then
            read in full, unless a sparse prefill is requested.
        about_part: a part of the text may be asked for. Else a text that makes up most of the prompt is read in full,
            unless the request says otherwise.
        about_session: the session so far is to be summarised, as when a client compacts it: what a cached prefix holds
            is used as it is, and what follows it is read whole, unless a sparse prefill is requested.
        constraint: None, or the grammar of the generated text.
        reasoning: None, or the budget of reasoning tokens.
        questions: that are answered behind the prompt, by a `Decisions` event, before anything is generated.
        min_tokens: number of tokens before stop ids may be generated, unless the constraint leaves nothing else.
        label: cached prefixes and sessions are shared with requests of the same label.
        made: when it came, by the monotonic clock. What came before `Engine.drop_cached` leaves nothing in the caches.
    """

    prompt: TokenIds
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    specprefill: SpecPrefillOptions = field(default_factory=SpecPrefillOptions)
    spans: tuple[PromptSpan, ...] = ()
    about_everything: str | None = None
    about_part: bool = True
    about_session: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    reasoning: ReasoningBudget | None = None
    questions: tuple[Question, ...] = ()
    min_tokens: int = 0
    label: CacheLabel = SHARED
    made: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", as_token_ids(self.prompt))

    @property
    def system_prefix_len(self) -> int:
        """Return the tokens of the system prompt and the tools in front, which the sessions of one agent share."""
        messages = takewhile(lambda span: span.kind in ("system", "tools"), self.spans)
        return max((span.end for span in messages), default=0)

    @property
    def asked(self) -> int:
        """Return the tokens of all questions."""
        return sum(question.tokens.size for question in self.questions)

    @property
    def room_behind(self) -> int:
        """Return the tokens that questions take behind the prompt at a time."""
        rooms = [question.room for question in self.questions]
        return min(sum(rooms), max([QUESTIONS_AT_ONCE, *rooms]))

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
