"""Finds where the question of a prompt may stand: the lines whose attention says which tokens matter.

It is the last line or sentence of the last message. People and agents also write it in front of a file, in the system
message, a turn before the text, or in front of rules for the answer, and as an order without a question mark. So unless
that last line is the only question, other lines are asked too: short paragraphs, the ends of messages, lines with a
question mark, orders by their first word. They are fed once more behind the prompt, from where they see all of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..arrays import Indices
from ..config import ScoringConfig
from ..request import PromptSpan
from .text import PromptText

_USERS = 2  # newest user messages that may ask
_HEAD = 48  # tokens at the head of a message, where people ask; so do questions and orders at the last one's end
_TAIL, _SYSTEM = 160, 64  # tokens at the end of a user message and of a system message, where any line may ask
_QUESTIONS = 8  # questions and orders elsewhere in these messages
_ROWS = 64, 256  # least and most tokens that are fed again in all, by the prompt's length
_PART = 12  # of the prompt's tokens one may be fed again
_PARAGRAPH = 144  # most tokens of one that may ask: an order with its rules
_LEAST = 3  # tokens of a line that can ask
_MARK_AT = 3  # last tokens of a question, among which its mark is
_QUESTION_WEIGHT, _APART_WEIGHT = 3.0, 2.0  # of a question, of a line in a short paragraph
_LABEL_WEIGHT, _ORDER_WEIGHT = 2.95, 2.9  # of what is labelled as a question, which stands among an app's orders
_BEFORE_ORDER = r"\s*(?:(?:question|task|frage|please|bitte|now,?)\W+)*"
_WORK = r"""check|compare|complete|create|fix|make|provide|read|rewrite|summari[sz]e|translate|write
    |fasse|prüfe|schreibe?|übersetze?"""  # what is to be done with a text mostly takes all of it
_ORDER = re.compile(
    rf"""{_BEFORE_ORDER}
    (?:{_WORK}
    |answer|describe|determine|explain|extract|find|give|highlight|identify|list|look|name|quote|say|show|state|tell
    |how|what|when(?=\ (?:did|do|does|is|was|were|will)\b)|where|which|who|whom|whose|why
    |beantworte|erkläre?|finde|gib|nenne|sag|zeige?)\ \w""",
    re.VERBOSE,
)
_WORK_ORDER = re.compile(rf"{_BEFORE_ORDER}(?:{_WORK})\ \w", re.VERBOSE)
_LABEL = re.compile(r"[\s#*]*(?:[\w']+ ){0,3}(?:question|query|frage)(?: is(?: as follows)?)?[ *]*:\W*\w")  # of apps
_BEGIN = 12  # tokens in which an order shows, or a label
_INDENT, _TEMPLATE = re.compile(r"\s\s|\t"), re.compile(r"(?:\s\s|\t)\s*[A-Z]")
_FRAME = re.compile(r"</?[\w-][^<>]*>|```.*")  # a tag or a fence, which ends a paragraph as a blank line does


def question_span(
    prompt_len: int, config: ScoringConfig, end: int | None = None, units: Indices | None = None
) -> tuple[int, int]:
    """Return [start, end) of the question's tokens, at least one.

    Args:
        end: of the last message; the prompt's if not given.
        units: starts of lines and sentences. The last one before `end` is the question, within the limits of
            `ScoringConfig.question_rows`. Without units the lower limit gives the number of tokens.
    """
    least, most = config.question_rows
    end = prompt_len if end is None else max(1, min(end, prompt_len))
    rows = least
    if units is not None and (before := units[units < end]).size:
        rows = min(max(end - int(before[-1]), least), most)
    return max(0, end - rows), end


def repeated_question_spans(
    spans: Sequence[PromptSpan], config: ScoringConfig, units: Indices
) -> tuple[tuple[int, int], ...]:
    """Return the ranges [start, end) of the question in a prompt that ends with tool results, in reading order.

    These are the model's last call with the text before it, and the last line or sentence of the last user message,
    each with header and end marker. Empty if the prompt ends with another kind of message: that one is the question.
    """
    users = [span for span in spans if span.kind == "user"]
    if not users or spans[-1].kind != "tool":
        return ()
    user = users[-1]
    called = next((span for span in reversed(spans) if span.kind == "assistant" and span.start > user.start), None)
    places = []
    if called is not None:
        said = max(called.content_start, called.content_end - config.question_rows[1])
        places += [(called.start, called.content_start), (said, called.end)]
    question = max(user.content_start, question_span(user.content_end, config, units=units)[0])
    places += [(user.start, user.content_start), (question, user.end)]
    return tuple((start, end) for start, end in places if start < end)


class Ask(NamedTuple):
    """A line or sentence that may be the question: prompt indices [start, end), and its weight beside others.

    `read`: the target has to read it. Else it competes by its score as all text does.
    """

    start: int
    end: int
    weight: float
    read: bool = False


def possible_questions(
    spans: Sequence[PromptSpan], prompt_len: int, text: PromptText, config: ScoringConfig
) -> tuple[Ask, ...]:
    """Return the lines that may ask beside the last one, in reading order: a twelfth of the prompt, 64 to 256 tokens.

    None if the last line of the last user message is a question, no other line is, and that message begins with no
    order.

    Args:
        spans: of the prompt's messages; none for a raw completion, which is treated as one user message. People begin a
            message with what they want, but not a text that is to be continued.
    """
    head, longest = _HEAD if spans else 0, config.question_rows[1]
    spans = spans or [PromptSpan("user", 0, 0, prompt_len, prompt_len)]
    users = [span for span in spans if span.kind == "user"][-_USERS:][::-1]
    if not users:
        return ()
    # The head of the newest message, and its end: the last line is asked in any case.
    begun, end = range(users[0].content_start, users[0].content_start + head), users[0].content_end
    said = {span: [*_lines(span, text, longest, begun)] for span in spans if span.kind in ("user", "system")}
    systems = [span for span in said if span.kind == "system"]
    ends = [line for span in systems for line in said[span] if line.start >= span.content_end - _SYSTEM]
    ends += [line for line in said[users[0]] if line.start in begun]
    ends += [line for span in (*users, *systems) for line in said[span] if line.end <= span.content_start + _HEAD]
    marked = _marked(ends, said)
    if [line.end for line in marked if line.weight == _QUESTION_WEIGHT or line.start in begun] == [end]:
        return ()
    apart = [line for span in users for line in _apart(span, said[span], text, longest)] or ends
    placed = {*apart, *ends, *(line for line in marked if line.start >= end - _HEAD)}
    elsewhere = Counter(line.weight for line in marked if line not in placed)  # several may be a document's own
    sure = [line for line in marked if line in placed or elsewhere[line.weight] == 1]
    tails = [line for span in users for line in reversed(said[span]) if line.start >= span.content_end - _TAIL]
    likely = (*sure, *said[users[0]][:1], *apart, *ends, *marked, *tails)
    others = dict.fromkeys(line for line in likely if line.end < end or line in marked)
    chosen = _within(min(_ROWS[1], max(_ROWS[0], prompt_len // _PART)), others)
    weights = dict.fromkeys(apart, _APART_WEIGHT) | {line: line.weight for line in sure}
    return tuple(Ask(*line[:2], weights.get(line, 1.0), line in placed or line in marked) for line in sorted(chosen))


def is_asked(asks: Sequence[Ask], text: PromptText) -> bool:
    """Return whether a part of the text is asked for: by a question, or an order other than to work on a text.

    Args:
        asks: as `possible_questions` returns them; none where the last line is a question.
    """
    known = ("".join(text.pieces[ask.start : ask.end]).lower() for ask in asks if ask.weight >= _ORDER_WEIGHT)
    return not asks or not all(map(_WORK_ORDER.match, known))


def _marked(ends: Sequence[Ask], said: Mapping[PromptSpan, Sequence[Ask]]) -> list[Ask]:
    """Return the questions and orders: those at the ends of messages; then the newest elsewhere, questions first."""
    inside = [line for lines in said.values() for line in lines if line.weight > 1][::-1]
    inside.sort(key=lambda line: -line.weight)
    return list(dict.fromkeys([*(line for line in ends if line.weight > 1), *inside[:_QUESTIONS]]))


def _within(left: int, lines: Iterable[Ask]) -> Iterator[Ask]:
    """Yield the first lines that have together at most so many tokens."""
    for line in lines:
        if line.end - line.start <= left:
            yield line
            left -= line.end - line.start


def _apart(span: PromptSpan, lines: Sequence[Ask], text: PromptText, few: int) -> list[Ask]:
    """Return the lines of a message's first short paragraph and its last two: an order around a document, and what is
    said behind it, such as rules or a signature. The first and last of few tokens come first: a document has fewer.
    In front of a paragraph with a question mark there is text.

    Args:
        few: most tokens of a question without rules.
    """
    short = [(start, end) for start, end in _paragraphs(span, text) if end - start <= _PARAGRAPH]
    tiny = [(start, end) for start, end in short if end - start <= few]
    asked = any(line.weight == _QUESTION_WEIGHT for start, _ in short[-1:] for line in lines if line.start >= start)
    likely = tiny[:1] + tiny[-1:] + short[:1] + short[-1:] + ([] if asked else short[-2:-1])
    return [line for start, end in dict.fromkeys(likely) for line in lines if start <= line.start and line.end <= end]


def _paragraphs(span: PromptSpan, text: PromptText) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of what stands between a message's blank lines, tags and fences. Code is indented: none."""
    begin, breaks, indented = None, 0, False
    for first, last in _units(span, text):
        said = "".join(text.pieces[first:last])
        if shown := said.strip():
            frame = _FRAME.fullmatch(shown) is not None
            if begin is not None and (frame or breaks > 1):
                if not indented:
                    yield begin, first
                begin = None
            if begin is None and not frame:
                begin, indented = first, False
            indented = indented or _is_indented(first, span, text)
            breaks = 0
        breaks += said[len(said.rstrip()) :].count("\n")
    if begin is not None and not indented:
        yield begin, span.content_end


def _lines(span: PromptSpan, text: PromptText, longest: int, begun: range) -> Iterator[Ask]:
    """Yield a message's lines and sentences that can ask, in reading order. Of longer ones the end counts; of an order,
    and of what begins at one of these tokens, the beginning.
    """
    marks = set(text.marks[(text.marks >= span.content_start) & (text.marks < span.content_end)].tolist())
    for first, last in _units(span, text):
        if last - first >= _LEAST:
            asks = not marks.isdisjoint(range(last - _MARK_AT, last))
            weight = _QUESTION_WEIGHT if asks else _weight_by_begin(first, last, span, text)
            from_end = asks or (weight == 1 and first not in begun)
            start = max(first, last - longest) if from_end else first
            yield Ask(start, min(last, start + longest), weight)


def _weight_by_begin(first: int, last: int, span: PromptSpan, text: PromptText) -> float:
    """Return a line's weight by its first words. An indented one is code, or a comment in it."""
    begin = "".join(text.pieces[first : min(last, first + _BEGIN)]).lower()
    known = _LABEL_WEIGHT if _LABEL.match(begin) else _ORDER_WEIGHT if _ORDER.match(begin) else 1.0
    return 1.0 if known > 1 and _is_indented(first, span, text) else known


def _is_indented(start: int, span: PromptSpan, text: PromptText) -> bool:
    """Return whether a line begins with two blanks or a tab. A line break's token may have them.

    In a message that begins so, and with a capital letter, none counts: an app's template is indented whole.
    """
    if _INDENT.match(_line_begin(start, text)) is None:
        return False
    return _TEMPLATE.match(_line_begin(span.content_start, text)) is None


def _line_begin(start: int, text: PromptText) -> str:
    blanks = "".join(text.pieces[max(start - 1, 0) : start]).rpartition("\n")[2]
    return blanks + "".join(text.pieces[start : start + _BEGIN])


def _units(span: PromptSpan, text: PromptText) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of a message's lines and sentences, those too that can't ask."""
    start, end = span.content_start, span.content_end
    inside = text.units[(text.units > start) & (text.units < end)].tolist()
    yield from pairwise([start, *inside, end])
