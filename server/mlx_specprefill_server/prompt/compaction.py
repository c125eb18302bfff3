"""Knows the request with which an agent compacts its session, which is at its longest then: it asks for a summary.

It is known by the words of Claude Code, Codex, opencode, pi and Qwen-Code. A user who asks for a summary of a text
that was pasted says it in others: then the whole text is read.
"""

from __future__ import annotations

import re

_COMPACTION = re.compile(
    r"""\bsummary\ of\ (?:the|our|this)\ (?:conversation|session)\ (?:so\ far|history)\b
    | \bprompt\ for\ continuing\ our\ (?:conversation|session)\b
    | \banchored\ summary\b.{0,60}\b(?:conversation|session)\b
    | \bmessages\ above\ are\ (?:a\ conversation\ to\ summari[sz]e|new\ conversation)\b
    | \bcontext\ checkpoint\ compaction\b
    | \bgenerate\ (?:the|an?\ updated)\ <state_snapshot>""",
    re.IGNORECASE | re.VERBOSE,
)
_INSTRUCTION = 16384  # characters at the end of a message that hold an agent's instruction, behind what else it says


def asks_to_compact(message: str) -> bool:
    """Return whether a message behind an answer asks for a summary of the session so far."""
    return _COMPACTION.search(message, max(0, len(message) - _INSTRUCTION)) is not None
