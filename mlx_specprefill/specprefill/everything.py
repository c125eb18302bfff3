"""Detects questions about a whole text: a count, a summary, a list of everything.

Scores do not show them: a draft's heads attend to each relevant place, but no single place holds the answer. So the
question's words are checked.
"""

from __future__ import annotations

import re

__all__ = ["about_everything"]

_WHOLE = re.compile(
    r"""\bhow\ (?:many|often)\b
    | \b(?:count|tally|enumerate|summari[sz]e|summary|overview|outline|gist|tl;?dr|proofread|paraphrase|rephrase)\b
    | \bnumber\ of\ (?:times|occurrences)\b
    | \b(?:list|name|give|find|show|extract|identify|collect|mention)\ (?:me\ )?(?:all|every|each)\b
    | \b(?:most|least)\ (?:common|frequent|often|frequently)\b
    | \b(?:main|key|central)\ (?:points?|ideas?|topics?|themes?|messages?)\b
    | \b(?:rewrite|reword|refactor|translate|reformat|convert|correct|edit|shorten|review)\ (?:the|this|it|all|my)\b
    | \b(?:everything|whole|entire|throughout|overall|all\ of\ (?:the|them|this)|in\ total|altogether)\b""",
    re.IGNORECASE | re.VERBOSE,
)


def about_everything(question: str) -> str | None:
    """Return the words that ask for the whole text; None if there are none. English only."""
    found = _WHOLE.search(question)
    return None if found is None else found.group()
