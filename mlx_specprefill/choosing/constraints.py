"""Grammars, reasoning budgets and least lengths of answers: which tokens of the vocabulary may come next.

llguidance keeps the grammar's state on the CPU and returns the permitted tokens. The code that chooses the token
applies the mask to the logits. Nothing here touches an array of MLX or needs a particular device.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..arrays import Bools
from ..errors import InvalidRequestError
from ..remembered import Remembered
from ..request import Constraint, ReasoningBudget

T = TypeVar("T")

_LARGEST = 1 << 20  # characters of a grammar
_MOST_LINES = 2000  # each is a rule at most; compiling a chain of rules takes time with the square of their number
_MOST_PATTERNS = 100  # patternProperties of an object: the time to compare them grows with the cube of their number
# llguidance compiles by recursion into rules and into references of schemas, without a limit: a grammar of the greatest
# size has used a quarter of this. Only what is used takes memory.
_STACK = 512 << 20  # bytes
_STACK_SIZE_LOCK = threading.Lock()  # the size is a setting of the whole process
_COMPILED = 128 << 20  # bytes of compiled grammars that are kept
_PROBED = 4  # tokens of a possible answer that are tried
# A step stays within some 100 ms for any grammar; llguidance's own limits allow seconds.
_LIMITS = LLParserLimits(max_items_in_row=1000, step_max_items=20_000, step_lexer_fuel=100_000)
# Otherwise llguidance splits forced text as the tokenizer does, special tokens included, which its parser refuses. And
# the model could not choose between two spellings.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_JSON = re.compile(r"%json\s*")
_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_DETAILS = re.compile(r"\n<|\n +\d+ \|")
_LONGEST_MESSAGE = 400


def stack_masks(masks: Sequence[Bools | None], size: int) -> Bools:
    """Return the masks (size,) of R rows as one, (R, size); a row without a mask permits all."""
    return np.stack([np.ones(size, np.bool_) if mask is None else mask for mask in masks])


class LLGuidanceState:
    """A grammar that llguidance follows: `accept` each token, call `mask` before the next.

    Args:
        stops: ids that end the answer; permitted where the grammar's text may end.
        eos: ids that the grammar itself treats as the end.
        min_tokens: number of tokens before stop ids are permitted, unless nothing else may follow.
    """

    def __init__(
        self, constraint: Constraint, matcher: LLMatcher, stops: frozenset[int], eos: frozenset[int], min_tokens: int
    ) -> None:
        self._matcher = matcher
        self._field = constraint.field
        self._trigger = constraint.starts_after  # () once it has been seen
        self._recent: tuple[int, ...] = ()
        self._stops = sorted(stops or eos)
        self._foreign = sorted(eos - stops) if stops else []
        self._min_tokens = min_tokens
        self._count = 0
        self._over = False

    def fork(self) -> LLGuidanceState:
        """Return an independent copy, for tokens that may be taken back."""
        twin = copy.copy(self)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def accept(self, token: int) -> None:
        """Advance by a generated token.

        Raises:
            InvalidRequestError: the grammar has become too complex to follow.
        """
        self._count += 1
        if self._trigger:
            self._recent = (*self._recent, token)[-len(self._trigger) :]
            if self._recent == self._trigger:
                self._trigger = ()
        elif not self._over:
            self._over = token in self._stops and self._matcher.is_accepting()
            if not self._over and not self._matcher.consume_token(token):
                raise self._error(_brief(self._matcher.get_error()))

    def mask(self, size: int) -> Bools | None:
        """Return a mask of the permitted ids, (size,) bool; None permits all. Raises as `accept`."""
        if self._trigger:
            return None
        mask = self._by_grammar(size)
        stops = [stop for stop in self._stops if stop < size]
        if self._over or self._matcher.is_accepting():
            mask[stops] = True
        if self._count < self._min_tokens and np.delete(mask, stops).any():
            mask[stops] = False
        if not mask.any():
            raise self._error("no token continues the text")
        return mask

    def _by_grammar(self, size: int) -> Bools:
        """Return the mask of text that may continue. The request's stop ids, if any, replace the grammar's end.

        A forward has just emptied the caches, so speed depends on how little code runs.
        """
        if self._over:
            return np.zeros(size, np.bool_)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise self._error(_brief(self._matcher.get_error()))
        mask = np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)  # zeros for missing bits
        if self._foreign:
            mask[[token for token in self._foreign if token < size]] = False
        return mask

    def _error(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._field}: the grammar can't be followed: {why}", self._field)


class ReasoningBudgetState:
    """Ends reasoning when its budget is used up. Used as `LLGuidanceState`.

    Args:
        inner: the answer's grammar, if it has one.
    """

    def __init__(self, budget: ReasoningBudget, inner: LLGuidanceState | None = None) -> None:
        self._budget = budget
        self._inner = inner
        self._inside = budget.opened
        self._spent = 0
        self._recent: tuple[int, ...] = ()
        self._closing: tuple[int, ...] = ()  # tokens that have to follow
        self._close_when_spent()

    def fork(self) -> ReasoningBudgetState:
        twin = copy.copy(self)
        twin._inner = None if self._inner is None else self._inner.fork()
        return twin

    def accept(self, token: int) -> None:
        if self._inner is not None:
            self._inner.accept(token)
        budget = self._budget
        self._recent = (*self._recent, token)[-max(len(budget.start), len(budget.end)) :]
        self._closing = self._closing[1:]
        if self._inside:
            self._spent += 1
            self._inside = self._recent[-len(budget.end) :] != budget.end
        else:
            self._inside = self._recent[-len(budget.start) :] == budget.start
        self._close_when_spent()

    def mask(self, size: int) -> Bools | None:
        """Return the grammar's mask, replaced while the budget forces tokens; raises as the grammar."""
        if self._closing:
            only = np.zeros(size, np.bool_)
            only[self._closing[0]] = True
            return only
        mask = None if self._inner is None else self._inner.mask(size)
        *before, last = self._budget.start
        reopens = not before or self._recent[-len(before) :] == tuple(before)
        if self._inside or self._spent < self._budget.tokens or not reopens:
            return mask
        cut = np.ones(size, np.bool_) if mask is None else mask.copy()
        cut[last] = False
        return cut if cut.any() else mask

    def _close_when_spent(self) -> None:
        if self._inside and self._spent >= self._budget.tokens and not self._closing:
            self._closing = self._budget.closing


GrammarState = LLGuidanceState | ReasoningBudgetState


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe.

    Args:
        tokenizer: mlx-lm's wrapper.
        eos: ids that end an answer.
    """

    def __init__(self, tokenizer: TokenizerWrapper, eos: frozenset[int]) -> None:
        self._wrapped = tokenizer._tokenizer
        self._eos = eos
        self._compiled = Remembered(self._compile, _compiled_size, _COMPILED)

    def check(self, constraint: Constraint, made: float | None = None) -> None:
        """Compile the grammar, unless it was compiled before.

        Args:
            made: when it came, as in `GenerationRequest`; None: now.

        Raises:
            InvalidRequestError: names the field and the grammar's error.
        """
        self._matcher(constraint, made)

    def state(
        self, constraint: Constraint, stops: frozenset[int], min_tokens: int = 0, made: float | None = None
    ) -> LLGuidanceState:
        """Return the state of one answer.

        Args:
            made: as in `check`.

        Raises:
            InvalidRequestError: as `check`.
        """
        matcher = self._matcher(constraint, made).deep_copy()
        return LLGuidanceState(constraint, matcher, stops, self._eos, min_tokens)

    def forget(self) -> None:
        """Drop all compiled grammars, which say what answers were asked for, and keep none that came before."""
        self._compiled.forget()

    def _matcher(self, constraint: Constraint, made: float | None) -> LLMatcher:
        try:
            return self._compiled(constraint.grammar, made)
        except ValueError as error:
            raise InvalidRequestError(f"{constraint.field}: {error}", constraint.field) from error

    def _compile(self, grammar: str) -> LLMatcher:
        return _compile(grammar, self._tokenizer)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            return from_tokenizer(self._wrapped, eos_token=sorted(self._eos) or None)
        except ValueError as error:
            raise ValueError(f"this model's tokenizer can't be guided by a grammar ({error})") from error


def grammar_warnings(grammar: str) -> list[str]:
    """Return sentences about what is not enforced of the schemas in a grammar. It may take milliseconds.

    Raises:
        ValueError: no answer can follow it, whatever the tokenizer; what is wrong with it.
    """
    _check_size(grammar)
    judge = partial(LLMatcher.validate_grammar_with_warnings, grammar, LLTokenizer("byte"), limits=_LIMITS)
    is_wrong, sentences = _on_large_stack(judge)
    if is_wrong:
        raise ValueError(_brief(sentences[0]))
    return list(sentences)


def _compile(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return the state before the first token.

    Raises:
        ValueError: what is wrong with the grammar.
    """
    _check_size(grammar)
    matcher = _on_large_stack(partial(LLMatcher, tokenizer, grammar + _NO_FORCING, log_level=0, limits=_LIMITS))
    probe = matcher.deep_copy()
    for _ in range(_PROBED):  # a grammar that is too complex mostly fails at the first tokens
        bits = np.frombuffer(probe.compute_bitmask(), np.uint8)
        if probe.is_error():
            raise ValueError(_brief(probe.get_error()))
        if not bits.any() or probe.is_stopped():
            break
        probe.consume_token(int(np.unpackbits(bits, bitorder="little").argmax()))
    return matcher


def _check_size(grammar: str) -> None:
    if len(grammar) > _LARGEST:
        raise ValueError(f"the grammar has {len(grammar)} characters, more than {_LARGEST}")
    if (lines := grammar.count("\n")) > _MOST_LINES:
        raise ValueError(f"the grammar has {lines} lines, more than {_MOST_LINES}")
    for found in _JSON.finditer(grammar):
        if (patterns := _count_patterns(grammar, found.end())) > _MOST_PATTERNS:
            raise ValueError(f"a schema has {patterns} patternProperties, more than {_MOST_PATTERNS}")


def _count_patterns(grammar: str, at: int) -> int:
    """Return the number of patternProperties in the schema at a place of a grammar, 0 for what is no JSON."""
    counts = list[int]()

    def count(members: dict[str, Any]) -> dict[str, Any]:
        named = members.get("patternProperties")
        counts.append(len(named) if isinstance(named, dict) else 0)
        return members

    with suppress(ValueError, RecursionError):  # llguidance refuses it, too
        json.JSONDecoder(object_hook=count, parse_int=float).raw_decode(grammar, at)
    return sum(counts)


def _compiled_size(grammar: str) -> int:
    """Return the bytes of a compiled grammar, as measured: 230 for a character of a short one, 45 of a long one."""
    return (1 << 18) + 64 * len(grammar)


def _on_large_stack(call: Callable[[], T]) -> T:
    """Return the call's result, made on a thread of its own with a large stack; raises as the call."""
    with ThreadPoolExecutor(1, thread_name_prefix="grammar") as executor:
        with _STACK_SIZE_LOCK:
            usual = threading.stack_size(_STACK)
            try:
                future = executor.submit(call)
            finally:
                threading.stack_size(usual)
        return future.result()


def _brief(error: str) -> str:
    """Return llguidance's message without places, its parser dump and grammar excerpts."""
    text = _PLACE.sub("", _DETAILS.split(error, maxsplit=1)[0].strip())
    if text == "NoExtensionBias":
        return "no text satisfies the grammar"
    if text.startswith("panic"):  # a table of its is full
        return "the grammar has too many parts"
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."
