"""From token ids to text and from engine events to answer deltas: detokenizer, stop strings, vocabulary, reader."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from mlx_specprefill import EngineClosedError, Failed, Finished, PrefillReport, TokenEvent, TokenIds

from ..deltas import (
    AnswerDelta,
    AnswerDone,
    CallBroken,
    CallDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    FinishReason,
    ReasoningDelta,
    TextDelta,
)
from ..parsers.base import Parser, overlap
from .loops import LoopGuard

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CONTEXT_TOKENS = 5  # before new tokens: the first token's text (a leading space) depends on them
MOST_CONTEXT = 24  # tokens; cutting the context costs a decode, so it happens only every so often
UNFINISHED_BYTES = 3  # bytes of an unfinished character, at most; a decoder shows one sign for all, or one for each

UNSEEN = "{} was called, a deferred tool that nothing has loaded: the model has not seen its schema"

Decode = Callable[[Sequence[int]], str]


class IncrementalDetokenizer:
    """The text of a growing list of tokens, never cut inside a character.

    Tokens are decoded behind some context. Two things end it early, since a run of single-byte tokens (`<0xE4>`) with
    one wrong byte decodes to replacement characters only. A character that is not finished spoils those before it in
    its run, which were returned already. A wrong byte would spoil all after it.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] | TokenIds = ()) -> None:
        self._decode = decode
        self._tokens = [int(token) for token in prompt[-CONTEXT_TOKENS:]]
        while decode(self._tokens).startswith(REPLACEMENT):  # begins inside a character
            del self._tokens[0]
        self._given_text = decode(self._tokens)  # what has been returned of the tokens' text
        self._border = len(self._tokens)  # number of tokens whose whole text has been returned
        self._cut = 0  # a border with enough tokens behind it, once they are too many

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._text()
        if text.endswith(REPLACEMENT) and (skipped := self._skip_wrong_bytes(text)):
            return skipped
        return self._take(text, _unsure(text))

    def finish(self) -> str:
        return self._take(self._text(), 0)

    def _text(self) -> str:
        """Decode the tokens. Forget the context if they spoil it."""
        text = self._decode(self._tokens)
        if text.startswith(self._given_text):
            return text
        self._forget(self._border)
        return self._decode(self._tokens)

    def _take(self, text: str, unsure: int) -> str:
        """Return the new part of `text`, without its last `unsure` characters."""
        sure = text[: max(len(text) - unsure, len(self._given_text))]
        new = sure[len(self._given_text) :]
        self._given_text = sure
        if not unsure:
            self._border = len(self._tokens)
            if self._border <= MOST_CONTEXT - CONTEXT_TOKENS:
                self._cut = self._border
        if len(self._tokens) > MOST_CONTEXT:
            self._shorten(unsure)
        return new

    def _shorten(self, unsure: int) -> None:
        """Cut the context at a border. Without one, each token ends inside a character, and any place will do."""
        self._forget(self._cut or len(self._tokens) - CONTEXT_TOKENS)
        text = self._decode(self._tokens)
        self._given_text = text[: len(text) - unsure]

    def _skip_wrong_bytes(self, text: str) -> str:
        """Return wrong bytes as such, and the text behind them. Forget them, so that they spoil no more."""
        too_many = text.endswith(REPLACEMENT * (UNFINISHED_BYTES + 1))
        for count in range(1, min(UNFINISHED_BYTES + 1, len(self._tokens) - self._border)):
            behind = self._decode(self._tokens[-count:])
            if REPLACEMENT in behind and not (too_many and count == UNFINISHED_BYTES):
                continue  # may still become a character
            before = self._decode(self._tokens[:-count])
            if before + REPLACEMENT * count == text:
                new = before[len(self._given_text) :]
                self._forget(len(self._tokens) - count)
                return new + self._take(behind, _unsure(behind))
        return ""

    def _forget(self, count: int) -> None:
        """Forget the first `count` tokens."""
        del self._tokens[:count]
        self._border = max(0, self._border - count)
        self._cut = 0
        self._given_text = ""


def _unsure(text: str) -> int:
    """Return the number of last characters that may stand for an unfinished one."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), UNFINISHED_BYTES)


@dataclass(eq=False)
class StopMatcher:
    """A matcher that holds back a possible stop string and ends at the first complete one.

    Args:
        stops: strings that end an answer.
        shown: the stop string is part of the text.
    """

    stops: Sequence[str] = ()
    shown: bool = False
    matched: str | None = field(default=None, init=False)
    _held: str = field(default="", init=False)

    def push(self, text: str) -> str:
        """Add text and return the part that can be shown now."""
        if self.matched is not None:
            return ""
        self._held += text
        matches = [(at + len(stop), at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if matches:
            end, at, self.matched = min(matches)
            return self._release(end if self.shown else at)
        return self._release(len(self._held) - overlap(self._held, self.stops))

    def finish(self) -> str:
        return "" if self.matched is not None else self._release(len(self._held))

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        return shown


class Vocabulary:
    """The token texts of one tokenizer, an mlx_lm TokenizerWrapper."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = {char: byte for byte, char in bytes_to_unicode().items()}
        # The innermost function of a fast tokenizer's `decode`. It runs once per generated token.
        self._backend = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None

    @cached_property
    def size(self) -> int:
        """The number of ids, which are 0..size-1."""
        return len(self._tokenizer)

    @cached_property
    def special(self) -> Mapping[str, int]:
        """The added tokens: markers that stand for themselves, never for their spelling."""
        added: Mapping[str, int] = self._tokenizer.get_added_vocab()
        return added

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an answer."""
        return frozenset(self._tokenizer.eos_token_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text unchanged: special tokens shown, spaces untouched."""
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text within another."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def token_text(self, token: int) -> str:
        """Return the text of one token. A part of a character shows as the replacement character."""
        text = self.decode([token])
        piece = self._piece(token)
        return f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text

    def token_bytes(self, token: int) -> list[int]:
        """Return the UTF-8 bytes of a token, also when they are not a whole character."""
        piece = self._piece(token)
        if match := BYTE_TOKEN.fullmatch(piece):
            return [int(match[1], 16)]
        text = self.token_text(token)
        if REPLACEMENT not in text:
            return list(text.encode())
        if all(char in self._bytes for char in piece):
            return [self._bytes[char] for char in piece]
        return list(text.encode())

    def _piece(self, token: int) -> str:
        return self._tokenizer.convert_ids_to_tokens([token])[0] or ""


@dataclass(eq=False)
class AnswerReader:
    """A reader of one answer. Stop strings end its visible text; without `parallel`, so does the first call.

    Args:
        end_ids: token ids that count but add no text.
        forced: the answer is calls only. It ends before a repeated call. Text, which could only be half a call, is
            dropped.
        with_tokens: each delta carries the tokens that begin in its text.
        every_token: tokens at the very end that decode to nothing come with an empty text.
        turn_end: a text that ends the answer like an end token, and is not shown.
        loops: ends an answer that repeats itself.
        unseen: the names of tools that the prompt does not show. A call to one is passed on with a warning.

    Attributes:
        completion_tokens: number of tokens, up to the one that completed a stop string.
    """

    detokenizer: IncrementalDetokenizer
    parser: Parser
    stop: StopMatcher = field(default_factory=StopMatcher)
    _: KW_ONLY
    end_ids: frozenset[int] = frozenset()
    parallel: bool = True
    forced: bool = False
    with_tokens: bool = False
    every_token: bool = False
    turn_end: str | None = None
    unseen: frozenset[str] = frozenset()
    loops: LoopGuard | None = None
    completion_tokens: int = field(default=0, init=False)
    _warnings: dict[str, None] = field(default_factory=dict, init=False)
    _new_ids: list[int] = field(default_factory=list, init=False)
    _calls: int = field(default=0, init=False)  # number of calls that are not broken
    _call: str = field(default="", init=False)  # the name of the tool that is being called
    _reasoning_tokens: int = field(default=0, init=False)
    _cut: bool = field(default=False, init=False)  # the request wants no more of the answer

    def __post_init__(self) -> None:
        self._distinct = _DistinctCalls() if self.forced else None
        self._tokens = _Tokens() if self.with_tokens else None
        self._turn = None if self.turn_end is None else StopMatcher((self.turn_end,))

    def push(self, event: TokenEvent) -> list[ContentDelta]:
        """Add one token and return the deltas that it completes, often none."""
        if self.over:
            return []
        self.completion_tokens += 1
        if event.token in self.end_ids:
            return []
        if self._tokens is not None:
            self._tokens.add(event)
            self._new_ids.append(event.token)
        deltas = self._read(self._in_turn(self.detokenizer.push(event.token)))
        if self.loops is not None and self.loops.push(event.token, self._call):
            self._warnings[self.loops.found] = None
        return deltas

    @property
    def in_loop(self) -> bool:
        """Return whether the answer was ended since it repeated itself."""
        return self.loops is not None and bool(self.loops.found)

    @property
    def over(self) -> bool:
        """Return whether no further token is wanted; the engine can stop."""
        return self._cut or self.in_loop or (self._turn is not None and self._turn.matched is not None)

    def _in_turn(self, text: str) -> str:
        """Return what can be read now of newly decoded text, up to the turn's end."""
        if self._tokens is not None:
            self._tokens.decoded += len(text)
        return text if self._turn is None else self._turn.push(text)

    def finish(self, event: Finished | Failed, report: PrefillReport) -> list[AnswerDelta]:
        """Return the rest of the answer and its end."""
        text = self._in_turn(self.detokenizer.finish()) + ("" if self._turn is None else self._turn.finish())
        deltas: list[AnswerDelta] = [] if self._cut else [*self._read(text)]
        ended = isinstance(event, Finished) and (self.over or event.reason == "stop") and not self.in_loop
        if self.parser.thinking and not self._cut:
            self._reasoning_tokens = self.completion_tokens
        if not self._cut:
            deltas += self._limit(self.parser.finish(ended))
        deltas += self._release(self.stop.finish())
        if self.every_token and self._tokens is not None and not self._cut and (tokens := self._tokens.rest()):
            deltas.append(TextDelta("", tokens, places=(0,) * len(tokens)))
        if ended:
            return [*deltas, self._done("tool_calls" if self._calls else "stop", report)]
        return [*deltas, self.failed(None if self.in_loop else _error(event), report)]

    def failed(self, error: Exception | None, report: PrefillReport) -> AnswerDone:
        """Return the end of an incomplete answer. `error` is None if it has reached its length."""
        return self._done("length", report, error)

    def take_ids(self) -> list[int]:
        """Return the token ids since the last call. Only `with_tokens`."""
        ids, self._new_ids = self._new_ids, []
        return ids

    def _done(self, reason: FinishReason, report: PrefillReport, error: Exception | None = None) -> AnswerDone:
        if self.in_loop and self.loops is not None:
            report = replace(report, ended=self.loops.found)
        counts = self.completion_tokens, self._reasoning_tokens
        return AnswerDone(reason, *counts, report, self.stop.matched, error, tuple(self._warnings))

    def _read(self, text: str) -> list[ContentDelta]:
        if not text:
            return []
        thinking = self.parser.thinking
        deltas = self._limit(self.parser.push(text))
        if thinking or self.parser.thinking:
            self._reasoning_tokens = self.completion_tokens
        return deltas

    def _limit(self, parsed: Sequence[ContentDelta]) -> list[ContentDelta]:
        """Return the parsed deltas that the request wants."""
        out: list[ContentDelta] = []
        for delta in parsed:
            for wanted in self._wanted(delta):
                out += [wanted] if self._distinct is None else self._distinct.push(wanted)
            self._cut = self._cut or (self._distinct is not None and self._distinct.repeated)
            if self._cut:
                break
        return out

    def _wanted(self, delta: ContentDelta) -> Iterator[ContentDelta]:
        match delta:
            case ReasoningDelta():
                yield self._with_tokens(delta)
            case TextDelta():
                if self._distinct is None:
                    yield from self._visible(delta)
            case CallStart():
                self._calls += 1
                self._call = delta.name
                if delta.name in self.unseen:
                    self._warnings[UNSEEN.format(delta.name)] = None
                yield from self._release(self.stop.finish())
                yield delta
            case CallDelta():
                yield delta
            case CallEnd():
                self._cut = not self.parallel
                self._call = ""
                yield delta
            case CallBroken():
                self._calls -= 1
                self._call = ""
                yield delta

    def _with_tokens(self, delta: ReasoningDelta) -> ReasoningDelta:
        if self._tokens is None:
            return delta
        self._tokens.hold(delta)
        placed = self._tokens.release(len(delta.text))
        return ReasoningDelta(delta.text, tuple(token for _, token in placed), delta.start)

    def _visible(self, delta: TextDelta) -> Iterator[TextDelta]:
        if self._tokens is not None:
            self._tokens.hold(delta)
        yield from self._release(self.stop.push(delta.text))
        self._cut = self.stop.matched is not None

    def _release(self, text: str) -> list[TextDelta]:
        placed = [] if self._tokens is None else self._tokens.release(len(text))
        tokens, places = tuple(token for _, token in placed), tuple(place for place, _ in placed)
        return [TextDelta(text, tokens, places=places)] if text or tokens else []


def _error(event: Finished | Failed) -> Exception | None:
    if isinstance(event, Failed):
        return event.error
    return EngineClosedError("the server is shutting down") if event.reason == "cancelled" else None


class _DistinctCalls:
    """A filter that holds back each call after the first until it is complete and differs from all before.

    Attributes:
        repeated: a call was made twice.
    """

    def __init__(self) -> None:
        self._made: set[tuple[str, str]] = set()
        self._name = ""
        self._held: list[ContentDelta] = []
        self.repeated = False

    def push(self, delta: ContentDelta) -> list[ContentDelta]:
        """Add a delta and return the deltas that can be shown now."""
        match delta:
            case CallStart():
                self._name = delta.name
                if not self._made:
                    return [delta]
                self._held = [delta]
                return []
            case CallDelta() if self._held:
                self._held.append(delta)
                return []
            case CallBroken() if self._held:
                self._held = []
                return []
            case CallEnd():
                return self._complete(delta)
        return [delta]

    def _complete(self, end: CallEnd) -> list[ContentDelta]:
        held, self._held = self._held, []
        made = self._name, json.dumps(json.loads(end.arguments, parse_int="int {}".format), sort_keys=True)
        self.repeated = made in self._made
        self._made.add(made)
        return [] if self.repeated else [*held, end]


class _Tokens:
    """Tokens that wait for the text that they begin in. Tokens that only write tags are dropped.

    Attributes:
        decoded: characters of the answer so far, tags included.
    """

    def __init__(self) -> None:
        self.decoded = 0
        self._waiting: deque[tuple[int, TokenEvent]] = deque()  # (first character, token)
        self._held: deque[list[int]] = deque()  # places of text that a stop string holds back: [start, end]

    def add(self, token: TokenEvent) -> None:
        self._waiting.append((self.decoded, token))

    def hold(self, delta: TextDelta | ReasoningDelta) -> None:
        if self._waiting:
            self._held.append([delta.start, delta.start + len(delta.text)])

    def release(self, count: int) -> list[tuple[int, TokenEvent]]:
        """Return the tokens that begin in the next `count` characters of held text, each with its place in them."""
        out: list[tuple[int, TokenEvent]] = []
        done = 0
        while done < count and self._held:
            span = self._held[0]
            size = min(count - done, span[1] - span[0])
            taken = self._take(span[0], span[0] + size)
            out += [(done + max(first - span[0], 0), token) for first, token in taken]
            done += size
            span[0] += size
            if span[0] == span[1]:
                self._held.popleft()
        return out

    def rest(self) -> tuple[TokenEvent, ...]:
        """Return the tokens that no text has taken."""
        return tuple(token for _, token in self._waiting)

    def _take(self, start: int, end: int) -> Iterator[tuple[int, TokenEvent]]:
        while self._waiting and self._waiting[0][0] < end:
            first, token = self._waiting.popleft()
            behind = self._waiting[0][0] if self._waiting else self.decoded
            if first >= start or behind > start:
                yield first, token
