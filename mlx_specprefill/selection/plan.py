"""Plans a prefill by the request and its length alone: sparse or full, and which tokens are forced. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..arrays import Bools, Spans
from ..cache.prefix.selection_key import SelectionKey
from ..config import EngineConfig, RuleName, Scope, SelectionConfig, SpecPrefillPolicy
from ..prefill_report import Mode, Prediction, Reason, ReasonCode
from ..request import GenerationRequest, PromptSpan
from .selector import selection_by

# (most tokens, divisor of the prompt length, fewest tokens): a short prompt still ends with its whole question
USER_WHOLE, USER_HEAD, USER_TAIL = (2048, 8, 32), (128, 64, 0), (512, 16, 32)
EARLIER_WHOLE = 256, 16, 0  # of the messages before the last: a question about its document, an offer that it takes
OWN_WHOLE, OWN_SHARE = 64, 16  # most tokens of one of the model's own earlier messages, divisor for all of these
TOOL_HEAD, TOOL_TAIL = 64, 128  # of a tool result after the last user message
PASSAGE = 32  # tokens that are kept for each of a request's questions
SYSTEM_WHOLE, SYSTEM_ENDS = 512, 256  # tokens: a shorter system text is kept in full, of a longer one both ends


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The prefill of one prompt: mode, rule, and the reason for its report.

    `keep`, `forced` (M,) and `ranges` have a meaning in sparse mode only. `predicted` is None without measurements.
    `scope` is the text that competes. `selection_key` names the selection rule that the
    sparse turns of a conversation share; None: the request is read in full, or has its own scores.
    """

    mode: Mode
    reason: Reason
    keep: Fraction
    forced: Bools
    ranges: tuple[ForcedRange, ...] = ()
    rule: RuleName = "default"
    predicted: Prediction | None = None
    scope: Scope = "user"
    selection_key: SelectionKey | None = None

    def asking(self, lines: Spans) -> PrefillPlan:
        """Return the plan behind the draft's reading, by which these lines are questions, (N, 2): they are kept."""
        ranges = tuple(ForcedRange(start, end, "question") for start, end in lines.tolist())
        return replace(self, ranges=self.ranges + ranges, forced=self.forced | forced_mask(ranges, self.forced.size))

    def as_full(self, code: ReasonCode, words: str) -> PrefillPlan:
        return replace(self, mode="full", reason=Reason(code, words))


def plan_prefill(
    request: GenerationRequest,
    config: EngineConfig,
    *,
    sparse_refusal: Reason | None,
    draft_context: int | None = None,
    cached_tokens: int | None = 0,
    predict: Callable[[int], Prediction] | None = None,
    gains_are_known: bool = False,
) -> PrefillPlan:
    """Decide from the request, the server's policy and the pair's abilities.

    Args:
        sparse_refusal: why this pair can't prefill sparsely, or None.
        draft_context: the draft's context length in tokens, None if unknown.
        cached_tokens: prompt tokens that a prefix cache already holds; all else looks at the rest. None: not known yet.
            The plan is then sparse if it could become so: all that is forced may be cached.
        predict: returns the times of both prefills if the target sees that many tokens of the rest; None: not known.
        gains_are_known: the prediction is by costs that were measured on this machine.
    """
    M = len(request.prompt)
    options, policy = request.specprefill, config.policy
    nominal = keep = policy.keep_pct if options.keep_pct is None else options.keep_pct
    least = 0 if options.keep_pct is not None else PASSAGE * len(request.questions)
    if policy.enabled and policy.threshold is None and options.enabled is None and options.keep_pct is None:
        least = max(least, policy.min_kept)
    keep = max(keep, min(Fraction(least, M), Fraction(1)))
    rule, scope = options.rule or config.rule, options.scope or policy.scope
    ranges = tuple(forced_ranges(request.spans, M, selection_by(rule, config.selection), scope))
    forced = forced_mask(ranges, M)
    rest = np.zeros(M, dtype=np.bool_) if cached_tokens is None else forced[cached_tokens:]
    predicted = None if predict is None else predict(_estimate_kept(keep, rest))
    plan = PrefillPlan("sparse", Reason("requested", "requested"), keep, forced, ranges, rule, predicted, scope)
    if options.enabled is False:
        return plan.as_full("request", "turned off by the request")
    if sparse_refusal is not None:
        return plan.as_full(sparse_refusal.code, sparse_refusal.words)
    if request.prompt_logprobs is not None:
        return plan.as_full("prompt-logprobs", "prompt log-probabilities need the logits of every token")
    key = SelectionKey(nominal, rule, scope, bool(options.enabled), estimates=policy.estimates(options.estimate))
    if (options.enabled or policy.enabled) and nominal < 1 and options.importance is None:
        plan = replace(plan, selection_key=key)
    if draft_context is not None and draft_context < M:
        plan = plan.as_full("draft-context", f"the prompt has {M} tokens, the draft's context {draft_context}")
    elif nominal < keep == 1:
        plan = plan.as_full("short", f"{M} prompt tokens, at least {least} are kept")
    elif options.enabled is None:
        plan = _by_policy(plan, config, rest.size, gains_are_known)
    if plan.mode == "sparse":
        plan = _check_drops_enough(plan, config, rest)
    if plan.selection_key is None or options.enabled:
        return plan
    if request.about_session:
        return plan.as_full("everything", "the session is to be summarised") if plan.mode == "sparse" else plan
    if request.about_everything:
        words = f'the question is about the whole prompt ("{request.about_everything}")'
        return _read_everything(plan, "everything", words)
    if plan.mode == "sparse" and _is_unasked(request, policy):
        return _read_everything(plan, "no-question", "no line is known to ask for a part of the text")
    return plan


def in_mode_of(submitted: PrefillPlan, plan: PrefillPlan) -> PrefillPlan:
    """Return the plan behind a cached prefix, as a full prefill where memory was reserved for one."""
    return replace(plan, mode="full", reason=submitted.reason) if submitted.mode == "full" else plan


def extended(plan: PrefillPlan, new: int, absent: int | None = None) -> PrefillPlan:
    """Return the plan for `new` tokens behind a sparse prefix: read in full, they extend it.

    Args:
        absent: tokens of that prefix that a summary has not seen unless they are recalled; None: it is none.
    """
    if plan.mode == "sparse":
        return plan
    words = f"{new} new tokens are read whole behind an earlier turn: {plan.reason.words}"
    if absent is not None:
        words += f"; it has not seen {absent} tokens that earlier turns left out, but for recalled ones"
    return replace(plan, reason=Reason("extended", words))


def _is_unasked(request: GenerationRequest, policy: SpecPrefillPolicy) -> bool:
    """Return whether a text was pasted of which nobody is known to ask for a part, and the server may choose."""
    options = request.specprefill
    is_open = policy.threshold is None and options.enabled is None and options.keep_pct is None
    return is_open and not request.about_part and _is_pasted(request.spans)


def _is_pasted(spans: Sequence[PromptSpan]) -> bool:
    """Return whether the newest message is the user's, holds most of the prompt, and no tool has been called.

    Without a question, and in words that are not known, people mostly want all of such a text: to translate it, to go
    on with it, to find what is wrong. An agent's conversation goes on without questions.
    """
    if not spans or spans[-1].kind != "user" or any(span.kind == "tool" for span in spans):
        return False
    return 2 * (spans[-1].content_end - spans[-1].content_start) > spans[-1].end


def _read_everything(plan: PrefillPlan, code: ReasonCode, words: str) -> PrefillPlan:
    """Read in full, behind a dense prefix at most."""
    return replace(plan.as_full(code, words) if plan.mode == "sparse" else plan, selection_key=None)


def _by_policy(plan: PrefillPlan, config: EngineConfig, uncached: int, gains_are_known: bool) -> PrefillPlan:
    """Apply the server's policy: by predicted times if known, else by length. A length forces no loss of time."""
    policy, predicted = config.policy, plan.predicted
    if not policy.enabled:
        return plan.as_full("policy", "off by server policy")
    if policy.threshold is None and predicted is not None:
        if pays(predicted, policy):
            return replace(plan, reason=Reason("predicted", predicted.words))
        return plan.as_full("predicted", f"{predicted.words}: too little to gain")
    if uncached > policy.long_prompt and gains_are_known and predicted is not None and predicted.saving_ms <= 0:
        return plan.as_full("predicted", f"{predicted.words}: nothing to gain, whatever the threshold")
    words = f"{uncached} uncached prompt tokens, threshold {policy.long_prompt}"
    return replace(plan, mode="sparse" if uncached > policy.long_prompt else "full", reason=Reason("threshold", words))


def pays(predicted: Prediction, policy: SpecPrefillPolicy) -> bool:
    """Return whether the predicted saving exceeds both margins of the policy."""
    enough = predicted.saving_ms >= policy.min_saving_ms
    return enough and predicted.saving_ms >= float(policy.min_saving_share) * predicted.full_ms


def _estimate_kept(keep: Fraction, forced: Bools) -> int:
    """Estimate the number of selected tokens: the share, but at least half of it beside forced tokens."""
    share = float(keep) * forced.size
    return int(min(forced.size, max(share, forced.sum() + share / 2)))


def likely_kept(plan: PrefillPlan) -> Bools:
    """Return a mask (M,) of as many tokens as will be kept: the forced ones, and others at even distances."""
    likely = plan.forced.copy()
    others = _estimate_kept(plan.keep, plan.forced) - int(plan.forced.sum())
    likely[:: likely.size // max(others, 1)] = True
    return likely


def _check_drops_enough(plan: PrefillPlan, config: EngineConfig, rest: Bools) -> PrefillPlan:
    """Return the plan, or a full prefill where a sparse one would drop too little.

    Args:
        rest: bool, which of the uncached tokens are forced.
    """
    if plan.keep == 1:
        return plan.as_full("keep-all", "keep is 100 %")
    share = Fraction(int(rest.sum()), max(rest.size, 1))
    limit = config.selection.max_forced_share
    if share > limit:
        of = "the prompt" if rest.size == plan.forced.size else f"{rest.size} uncached tokens"
        return plan.as_full("forced", f"forced tokens are {float(share):.0%} of {of}, limit {float(limit):.0%}")
    return plan


class ForcedRange(NamedTuple):
    """Prompt indices [start, end), and why they are kept."""

    start: int
    end: int
    reason: str


def forced_ranges(
    spans: Sequence[PromptSpan], prompt_len: int, config: SelectionConfig, scope: Scope = "user"
) -> list[ForcedRange]:
    """Return the ranges that are always kept, clipped to the prompt, in no order. Ranges may overlap.

    Args:
        spans: rendered messages in prompt order; none for a raw completion, which is treated as one user message.
        prompt_len: M >= 1.
        scope: the text that competes, as in `SpecPrefillPolicy.scope`.
    """
    last = ForcedRange(prompt_len - 1, prompt_len, "last prompt token")
    ranges = [ForcedRange(0, config.chunk_size, "first chunk"), last]
    ranges += _structure(spans, prompt_len)
    ranges += _system(spans, config.verbatim_system_limit, scope)
    ranges += _last_turn(spans or [PromptSpan("user", 0, 0, prompt_len, prompt_len)], prompt_len)
    return [ForcedRange(r.start, min(r.end, prompt_len), r.reason) for r in ranges if r.start < min(r.end, prompt_len)]


def forced_mask(ranges: Sequence[ForcedRange], prompt_len: int) -> Bools:
    """Return a mask (M,) that is true where a range covers the token."""
    mask = np.zeros(prompt_len, dtype=np.bool_)
    for r in ranges:
        mask[r.start : r.end] = True
    return mask


def template_mask(spans: Sequence[PromptSpan], question: tuple[int, int], forced: Bools) -> Bools:
    """Return a mask (M,) of forced tokens outside the searched text: the first, the template's, the question's.

    They get much attention for reasons that are not in the document: the first token and the delimiters are sinks, and
    the question's tokens attend to each other.

    Args:
        question: [start, end) of the question's tokens.
        forced: (M,) true for tokens that are always kept.
    """
    asks = ForcedRange(*question, "question")
    template = forced_mask([ForcedRange(0, 1, "first token"), asks, *_structure(spans, forced.size)], forced.size)
    return template & forced


def _structure(spans: Sequence[PromptSpan], prompt_len: int) -> Iterator[ForcedRange]:
    for span in spans:
        yield ForcedRange(span.start, span.content_start, "role header")
        yield ForcedRange(span.content_end, span.end, "end of turn")
    for before, after in pairwise(spans):
        yield ForcedRange(before.end, after.start, "template text")
    if spans:
        yield ForcedRange(0, spans[0].start, "template text")
        yield ForcedRange(spans[-1].end, prompt_len, "template tail")


def _system(spans: Sequence[PromptSpan], limit: int, scope: Scope) -> Iterator[ForcedRange]:
    for span in spans:
        if span.kind in ("system", "tools") and limit > 0:
            start, end = span.content_start, min(span.content_end, span.content_start + limit)
            limit -= end - start
            if scope == "user" or span.kind == "tools" or span.content_end - span.content_start <= SYSTEM_WHOLE:
                yield ForcedRange(start, end, "system prompt and tools")
            else:
                yield ForcedRange(start, min(start + SYSTEM_ENDS, end), "system prompt and tools")
                yield ForcedRange(span.content_end - SYSTEM_ENDS, end, "system prompt and tools")


def _last_turn(spans: Sequence[PromptSpan], prompt_len: int) -> Iterator[ForcedRange]:
    """Yield the last user message (or the last message, without a user), and the messages after it.

    The newest of these is kept in full, up to the limit of a user message. Agents call tools many times for one user
    message: of older messages the ends are kept. The user message before and the answer in between are kept if short,
    and what the model said and called before.
    """
    users = [i for i, span in enumerate(spans) if span.kind == "user"]
    newest = users[-1] if users else len(spans) - 1
    for before in users[-2:-1]:
        whole = _share(prompt_len, EARLIER_WHOLE)
        for index in {before, newest - 1}:
            if spans[index].kind != "tool":
                yield from _ends(spans[index], prompt_len, (0, 1, 0), (0, 1, 0), "message before the last", whole)
        yield from _own(spans[:newest], prompt_len // OWN_SHARE)
    yield from _ends(spans[newest], prompt_len, USER_HEAD, USER_TAIL, "last user message")
    whole = _share(prompt_len, USER_WHOLE)
    for span in reversed(spans[newest + 1 :]):
        if span.kind == "tool":
            yield from _ends(span, prompt_len, (TOOL_HEAD, 1, 0), (TOOL_TAIL, 1, 0), "tool result", whole)
        else:
            yield from _ends(span, prompt_len, USER_HEAD, USER_TAIL, "after the last user message", whole)
        whole = max(0, whole - (span.content_end - span.content_start))


def _own(spans: Sequence[PromptSpan], most: int) -> Iterator[ForcedRange]:
    """Yield the model's own short messages, the newest first, up to `most` tokens: they name what it works on."""
    for span in reversed(spans):
        size = span.content_end - span.content_start
        if span.kind == "assistant" and size <= OWN_WHOLE:
            most -= size
            if most < 0:
                return
            yield ForcedRange(span.content_start, span.content_end, "own words")


def _ends(
    span: PromptSpan,
    prompt_len: int,
    head: tuple[int, int, int],
    tail: tuple[int, int, int],
    reason: str,
    whole: int | None = None,
) -> Iterator[ForcedRange]:
    """Yield the whole content if it is short, else its two ends.

    Args:
        whole: tokens that count as short; None: the limit of a user message.
    """
    start, end = span.content_start, span.content_end
    if end - start <= (_share(prompt_len, USER_WHOLE) if whole is None else whole):
        yield ForcedRange(start, end, reason)
        return
    yield ForcedRange(start, min(end, start + _share(prompt_len, head)), f"{reason}: head")
    yield ForcedRange(max(start, end - _share(prompt_len, tail)), end, f"{reason}: tail")


def _share(prompt_len: int, rule: tuple[int, int, int]) -> int:
    most, divisor, least = rule
    return min(most, max(prompt_len // divisor, least))
