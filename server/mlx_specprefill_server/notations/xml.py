"""Qwen3-Coder's, Qwen3.5's and Nemotron-3's calls: a tag for each argument."""

from __future__ import annotations

from ..parsers.call_parts import CALL, END_CALL
from ..parsers.tag_calls import XML as TAGS
from .declaration import Notation, one_text

XML = Notation(marks=((CALL, TAGS.function),), text=one_text(TAGS), begun=(CALL, END_CALL))
