"""Finds words that ask for all of a text, or for a part of it. A prompt that asks for all of one is read in full.

Scores do not show it: a draft's heads attend to each relevant place, but no single place holds the answer. The words
are English, and some German.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_OPENING = 128  # characters of a message whose first line may be an instruction
_LEAST, _MOST = 64, 192  # characters at the end of a message in which its last line or sentence is read
_ENDS = 512  # characters at both ends of a message whose lines may ask
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
# The end of a session as text, or of its former summary, behind which pi and opencode say what to make of it.
_QUOTED = re.compile(r"</(?:conversation|history|messages|session|transcript|\w+-summary)>", re.IGNORECASE)
_BEHIND = 4096  # characters at the end of a message in which that stands
# An order for a part, where a line or sentence begins: any but those to work on a text. Code is indented.
_PART = re.compile(
    r"""(?:^|\n\ ?|[.!?]\ )(?:(?:question|task|frage|please|bitte|now)\W+)*(?:answer|describe|determine|explain|extract
    |find|give|highlight|identify|list|look|name|quote|say|show|state|tell|how|what|where|which|who|whom|whose|why
    |when(?=\ (?:did|do|does|is|was|were|will)\b)
    |beantworte|erkläre?|finde|gib|nenne|sag|zeige?)\ \w""",
    re.IGNORECASE | re.VERBOSE,
)
_MARK = re.compile(r"[?？؟]")
_BEFORE_A_UNIT = re.compile(r"\n+|[.!?] +|[。！？]")  # a line break, or the end of a sentence


def about_everything(message: str) -> str | None:
    """Return the words that ask for the whole text, in a message's first line and its last line or sentence, or behind
    a session that it quotes.
    """
    found, end = _WHOLE.search(question_in(message)), message[-_BEHIND:]
    if found is None and (quoted := _QUOTED.search(end)) is not None:
        found = _WHOLE.search(end, quoted.end())
    return None if found is None else found.group()


def is_asked(messages: Sequence[str]) -> bool:
    """Return whether one of the messages is known to ask for a part of a text, at its ends or by its only question."""
    # Places in the whole message, from a line break on, so that no word begins where it is cut.
    ends = [(said, *end) for said in messages for end in ((0, _ENDS), (max(0, len(said) - _ENDS - 2), len(said)))]
    alone = any(len(_MARK.findall(said)) == 1 for said in messages)
    return alone or any(_MARK.search(*end) or _PART.search(*end) for end in ends)


def question_in(message: str) -> str:
    """Return the first line and the last line or sentence, with a line break between them."""
    said = message.strip()
    end = said[-_MOST:]
    units = [match.end() for match in _BEFORE_A_UNIT.finditer(end) if match.end() < len(end)]
    start = min([max(0, len(end) - _LEAST), *units[-1:]])
    opening = said[:_OPENING].partition("\n")[0]
    return f"{opening}\n{end[start:]}"
