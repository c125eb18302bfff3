"""The heat map is a page that a person can read and that reads nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np

from mlx_specprefill import ChunkInfo, Inspection
from mlx_specprefill_server.explain import ExplainedChunk
from mlx_specprefill_server.explaining.heatmap import LEVELS, heat_levels, render_heatmap

TEXTS = ["<script>alert('x')</script> & \"quotes\"", "forced text", "kept text"]
CHUNKS = (
    ChunkInfo(index=0, start=0, end=32, score=0.001, forced=False, kept=False, kept_tokens=0),
    ChunkInfo(index=1, start=32, end=64, score=0.002, forced=True, kept=True, kept_tokens=5),
    ChunkInfo(index=2, start=64, end=80, score=0.3, forced=False, kept=True, kept_tokens=16),
)


def page(shown: list[ExplainedChunk] | None = None, **changes: object) -> str:
    fields = {
        "mode": "sparse",
        "reason": "80 uncached <prompt> tokens",
        "prompt_tokens": 80,
        "kept_tokens": 21,
        "importance": np.zeros(80, np.float32),
        "chunks": CHUNKS,
        "lookahead_tokens": (1, 2),
        "forced_ranges": ((32, 37, "role header & co"),),
    }
    inspection = Inspection(**{**fields, **changes})  # type: ignore[arg-type]
    rows = enumerate(zip(CHUNKS, TEXTS, strict=True))
    explained = [ExplainedChunk(chunk, text, 3 - i, f"why <{i}>") for i, (chunk, text) in rows]
    return render_heatmap(inspection, shown or explained, "target <a>, draft b")


class Reader(HTMLParser):
    """Text and attributes by tag."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    return reader


def test_text_is_escaped() -> None:
    reader = read(page())
    assert "script" not in {tag for tag, _ in reader.tags}
    for text in (*TEXTS, "80 uncached <prompt> tokens", "target <a>, draft b", "role header & co"):
        assert text in reader.words


def test_nothing_is_loaded_from_anywhere() -> None:
    html = page()
    assert not re.search(r"https?:|//|url\(|@import", html)
    assert {tag for tag, _ in read(html).tags}.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert "default-src 'none'" in html


def test_every_chunk_is_in_the_text_the_strip_and_the_table() -> None:
    reader = read(page())
    spans = [attrs for tag, attrs in reader.tags if tag == "span" and (attrs.get("id") or "").startswith("c")]
    links = [attrs["href"] for tag, attrs in reader.tags if tag == "a"]
    assert [attrs["id"] for attrs in spans] == ["c0", "c1", "c2"]
    assert links == ["#c0", "#c1", "#c2"]
    assert [(attrs["class"] or "").split()[0] for attrs in spans] == ["dropped", "forced", "kept"]


def test_states_differ_by_more_than_colour() -> None:
    words = read(page()).words
    for mark in ("✕0", "◆1", "✓2"):
        assert mark in words


def test_neighbours_of_one_state_share_a_mark() -> None:
    infos = [ChunkInfo(i, 8 * i, 8 * i + 8, 0.1, False, kept, 8 * kept) for i, kept in enumerate([True, True, False])]
    words = read(page(shown=[ExplainedChunk(info, f"text {info.index} ", 1, "") for info in infos])).words
    assert "✓0text 0 text 1 ✕2text 2" in words


def test_a_long_prompt_has_bars_wide_enough_to_see() -> None:
    """512 at most, here of three chunks each; a bar leads to its best chunk, or the best that is kept."""
    infos = [ChunkInfo(i, 8 * i, 8 * i + 8, 0.1, False, i in (7, 9), 0) for i in range(1030)]
    shown = [ExplainedChunk(info, "", 1030 - info.index, "") for info in infos]
    links = [attrs["href"] for tag, attrs in read(page(shown=shown)).tags if tag == "a"]
    assert len(links) == 344
    assert links[:4] == ["#c2", "#c5", "#c7", "#c9"]


def test_the_counts_and_the_mode_are_told() -> None:
    words = " ".join(read(page()).words.split())
    assert "The target reads 21 of 80 tokens: 2 of 3 chunks, 1 of them forced." in words
    assert "sparse, it would read 21 of 80 tokens" in " ".join(read(page(mode="full")).words.split())


def test_levels_are_ranks() -> None:
    assert heat_levels([0.1, 1e-9, 5.0]) == [2, 0, 4]
    assert heat_levels([0.5, 0.5, 0.5]) == [0, 0, 0]
    assert heat_levels([float(n) for n in range(LEVELS)]) == list(range(LEVELS))
    assert heat_levels([7.0]) == [0]
