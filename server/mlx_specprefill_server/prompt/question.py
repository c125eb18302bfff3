"""Finds words that ask for a whole text (a count, a summary, a list of everything): such a prompt is read in full.

An agent that compacts its session asks for a summary, too, when the session is at its longest. It is known by the words
of Claude Code, Codex, opencode, pi and Qwen-Code.

Scores do not show it: a draft's heads attend to each relevant place, but no single place holds the answer. The words
are English.
"""

from __future__ import annotations

import re

_OPENING = 128  # characters of a message whose first line may be an instruction
_LEAST, _MOST = 64, 192  # characters at the end of a message in which its last line or sentence is read
_WHOLE = re.compile(
    r"""\bhow\ (?:many|often)\b
    | \b(?:count|tally|enumerate|summari[sz]e|summary|overview|outline|gist|tl;?dr|proofread|paraphrase|rephrase)\b
    | \bnumber\ of\ (?:times|occurrences)\b
    | \b(?:list|name|give|find|show|extract|identify|collect|mention)\ (?:me\ )?(?:all|every|each)\b
    | \b(?:most|least)\ (?:common|frequent|often|frequently)\b
    | \b(?:main|key|central)\ (?:points?|ideas?|topics?|themes?|messages?)\b
    | \b(?:re-?write|reword|refactor|translate|reformat|convert|correct|edit|shorten|review)\ (?:the|this|it|all|my)\b
    | \b(?:everything|whole|entire|throughout|overall|all\ of\ (?:the|them|this)|in\ total|altogether)\b""",
    re.IGNORECASE | re.VERBOSE,
)
_COMPACTION = re.compile(
    r"""\b(?:summary|summari[sz]e|prompt\ for\ continuing)\b.{0,60}\b(?:conversation|session)\b
    | \b(?:conversation|session|history)\ to\ summari[sz]e\b
    | \bcontext\ checkpoint\ compaction\b
    | <state_snapshot>""",
    re.IGNORECASE | re.VERBOSE,
)
_INSTRUCTION = 4096  # characters of a message in which an agent says what to summarise
_BEFORE_A_UNIT = re.compile(r"\n+|[.!?] +|[。！？]")  # a line break, or the end of a sentence


def about_everything(message: str) -> str | None:
    """Return the words that ask for the whole text, in a message's first line and its last line or sentence."""
    found = _WHOLE.search(question_in(message))
    return None if found is None else found.group()


def asks_to_compact(message: str) -> bool:
    """Return whether a message behind an answer asks for a summary of the session so far."""
    return len(message) <= 4 * _INSTRUCTION and _COMPACTION.search(message[:_INSTRUCTION]) is not None


def question_in(message: str) -> str:
    """Return the first line and the last line or sentence, with a line break between them."""
    said = message.strip()
    end = said[-_MOST:]
    units = [match.end() for match in _BEFORE_A_UNIT.finditer(end) if match.end() < len(end)]
    start = min([max(0, len(end) - _LEAST), *units[-1:]])
    opening = said[:_OPENING].partition("\n")[0]
    return f"{opening}\n{end[start:]}"
