"""Results on disk: one JSON object per line. Lines are only appended, so an interrupted run loses one item at most."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .errors import OtherRunError

log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Cell:
    """The items of one task at one length."""

    task: str
    length: int


@dataclass(frozen=True)
class Record:
    """One item. `arms` has per arm its score, answer, kept share and measures. `skipped` says why there are none.

    Items of one `group` are not independent; empty: the item stands alone.
    """

    cell: Cell
    number: int
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: str | None = None
    group: str = ""


class Records:
    """Args:
        file: None keeps everything in memory.
        described: the model and all other values that must be equal for results to belong together.

    Raises:
        OtherRunError: the file holds results of another model or corpus.
    """

    def __init__(self, file: Path | None, described: Mapping[str, Any]) -> None:
        self._file = file
        self._done: dict[tuple[Cell, int], Record] = {}
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and (lines := list(_lines(file))):
            self._resume(lines, described)
            self._end_last_line(file)
        else:
            self._append({"run": dict(described)})

    def __iter__(self) -> Iterator[Record]:
        return iter(self._done.values())

    def find(self, cell: Cell, number: int) -> Record | None:
        """Return the record of an item, None if it has none or was skipped."""
        record = self._done.get((cell, number))
        return record if record is not None and record.skipped is None else None

    def add(self, record: Record) -> None:
        """Add a record. Later arms of an item join earlier ones."""
        self._take(record)
        self._append(asdict(record))

    def _take(self, record: Record) -> None:
        earlier = self.find(record.cell, record.number)
        if earlier is not None:
            record = replace(record, arms=earlier.arms | record.arms)
        self._done[record.cell, record.number] = record

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")

    def _end_last_line(self, file: Path) -> None:
        """End an incomplete last line, so that the next one does not join it."""
        if not file.read_bytes().endswith(b"\n"):
            with file.open("a", encoding="utf-8") as out:
                out.write("\n")

    def _resume(self, lines: list[dict[str, Any]], described: Mapping[str, Any]) -> None:
        before = lines[0].get("run")
        if before != dict(described):
            raise OtherRunError(
                f"{self._file} holds results of {before}, not of {dict(described)}; choose another --out"
            )
        for line in lines[1:]:
            self._take(Record(Cell(**line["cell"]), line["number"], line["arms"], line["skipped"], line["group"]))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines without an incomplete last one."""
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield json.loads(text)
        except ValueError:
            log.warning("%s: line %d is not JSON and is left out", file, number)
