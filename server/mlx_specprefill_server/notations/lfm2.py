"""LFM2's calls: as in Python, between marks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..parsers.json_calls import between_reader
from .declaration import Notation

MARK, END_MARK = "<|tool_call_start|>", "<|tool_call_end|>"


def _written(calls: Sequence[Mapping[str, Any]]) -> str:
    """Write calls as "Tool use" in Liquid's documentation does."""
    return f"{MARK}[{', '.join(map(_call, calls))}]{END_MARK}"


def _call(call: Mapping[str, Any]) -> str:
    arguments = ", ".join(f"{name}={_literal(value)}" for name, value in call["arguments"].items())
    return f"{call['name']}({arguments})"


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


LFM2 = Notation(
    readers={MARK: between_reader(MARK, END_MARK, python=True)},
    history=_written,
    history_mark=MARK,
)
