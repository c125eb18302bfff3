"""Knows the request with which an agent compacts its session, which is at its longest then: it asks for a summary.

It is known by the words of Claude Code, Codex, opencode, pi and Qwen-Code.
"""

from __future__ import annotations

import re

_COMPACTION = re.compile(
    r"""\b(?:summary|summari[sz]e|prompt\ for\ continuing)\b.{0,60}\b(?:conversation|session)\b
    | \b(?:conversation|session|history)\ to\ summari[sz]e\b
    | \bcontext\ checkpoint\ compaction\b
    | <state_snapshot>""",
    re.IGNORECASE | re.VERBOSE,
)
_INSTRUCTION = 4096  # characters of a message in which an agent says what to summarise


def asks_to_compact(message: str) -> bool:
    """Return whether a message behind an answer asks for a summary of the session so far."""
    return len(message) <= 4 * _INSTRUCTION and _COMPACTION.search(message[:_INSTRUCTION]) is not None
