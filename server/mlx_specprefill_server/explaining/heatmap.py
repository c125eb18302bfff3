"""A prompt as a heat map: one self-contained HTML page that needs no script, no font and no other host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from mlx_specprefill import ChunkInfo, Inspection

from ..explain import ExplainedChunk

__all__ = ["LEVELS", "chunk_state", "heat_levels", "render_heatmap"]

LEVELS = 6  # shades of the background; the strongest one marks the best sixth of the chunks

_BARS = 512
_Row = tuple[ExplainedChunk, int]  # and its shade

_MARKS = {"forced": "◆", "kept": "✓", "dropped": "✕"}

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #16181d; --faint: #5b616e; --line: #d5d9e0; --heat: 255 150 40;
  --kept: #0b57d0; --forced: #7a1fa2; }
@media (prefers-color-scheme: dark) { :root { --page: #14161a; --ink: #f1f3f6; --faint: #a3abb8; --line: #363b45;
  --heat: 190 92 0; --kept: #8ab4ff; --forced: #e0a3ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; }
p { margin: .3rem 0; }
.faint { color: var(--faint); }
.legend { display: flex; flex-wrap: wrap; gap: .4rem 1.4rem; margin: .8rem 0; padding: 0; list-style: none; }
.swatch { display: inline-block; width: 1.5rem; height: 1rem; vertical-align: -2px; border: 1px solid var(--line); }
.map { display: flex; align-items: flex-end; height: 4.5rem; margin: 1rem 0; border-bottom: 1px solid var(--line); }
.map a { flex: 1 1 0; min-width: 0; border: 1px solid var(--page); border-width: 0 .5px; }
.map .kept { background: var(--kept); } .map .forced { background: var(--forced); }
.map .dropped { background: repeating-linear-gradient(0deg, var(--line) 0 2px, transparent 2px 4px); }
.h0 { height: 8%; } .h1 { height: 25%; } .h2 { height: 43%; } .h3 { height: 62%; } .h4 { height: 81%; }
.h5 { height: 100%; }
.text { border: 1px solid var(--line); border-radius: 6px; padding: 1rem; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.75 ui-monospace, monospace; }
.text > span { unicode-bidi: isolate; scroll-margin: 3rem; }
.text > span:target { outline: 3px solid var(--kept); }
.text b { font: 600 11px/1 system-ui, sans-serif; padding: 0 .3em; }
.text .kept { border-bottom: 2px solid var(--kept); } .text .kept b { color: var(--kept); }
.text .forced { border-bottom: 4px double var(--forced); } .text .forced b { color: var(--forced); }
.text .dropped { font-style: italic; color: var(--faint); }
.s1 { background: rgb(var(--heat) / .1); } .s2 { background: rgb(var(--heat) / .2); }
.s3 { background: rgb(var(--heat) / .34); } .s4 { background: rgb(var(--heat) / .5); }
.s5 { background: rgb(var(--heat) / .7); }
.text .s4.dropped, .text .s5.dropped { color: var(--ink); }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .8rem .15rem 0; text-align: right; border-bottom: 1px solid var(--line); }
"""


def heat_levels(scores: Sequence[float]) -> list[int]:
    """Return each score's rank, cut into LEVELS equal parts. Equal scores get equal levels.

    Attention mass is heavy-tailed: on a linear scale one chunk would be dark and all others white.
    """
    ordered = sorted(scores)
    first_rank: dict[float, int] = {}
    for rank, score in enumerate(ordered):
        first_rank.setdefault(score, rank)
    return [first_rank[score] * LEVELS // len(ordered) for score in scores]


def render_heatmap(inspection: Inspection, chunks: Sequence[ExplainedChunk], models: str) -> str:
    """Return the whole page. All shown text is escaped."""
    levels = heat_levels([chunk.info.score for chunk in chunks])
    rows = list(zip(chunks, levels, strict=True))
    return _PAGE.format(
        style=_STYLE,
        facts=_facts(inspection, models),
        legend=_legend(),
        bars="".join(_bar(*best) for best in _bars(rows)),
        body="".join(_run(list(run)) for _, run in groupby(rows, lambda row: chunk_state(row[0].info))),
        forced="".join(_forced_row(*forced) for forced in inspection.forced_ranges),
        table="".join(_table_row(chunk.info) for chunk in chunks),
    )


def chunk_state(chunk: ChunkInfo) -> str:
    """Return the chunk's state: dropped, kept for its score, or forced (at least in part) by a rule."""
    if not chunk.kept:
        return "dropped"
    return "forced" if chunk.forced else "kept"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Which chunks of the prompt the target reads</title>
<style>{style}</style>
</head>
<body>
<h1>Which chunks of the prompt the target reads</h1>
{facts}
{legend}
<nav class="map" aria-label="The prompt in order; the higher the bar, the better the rank">{bars}</nav>
<main class="text">{body}</main>
<details><summary>What is kept by rule</summary>
<table><thead><tr><th>tokens</th><th>why</th></tr></thead><tbody>{forced}</tbody></table></details>
<details><summary>All chunks as a table</summary>
<table><thead><tr><th>chunk</th><th>tokens</th><th>score</th><th>kept</th><th>state</th></tr></thead>
<tbody>{table}</tbody></table></details>
</body>
</html>
"""


def _bars(rows: Sequence[_Row]) -> Iterator[_Row]:
    """Return at most as many bars as one can see. A bar shows the best of its kept chunks, else the best of all."""
    step = -(-len(rows) // _BARS)
    for start in range(0, len(rows), step):
        yield min(rows[start : start + step], key=lambda row: (not row[0].info.kept, row[0].rank))


def _bar(chunk: ExplainedChunk, level: int) -> str:
    info = chunk.info
    return f'<a class="{chunk_state(info)} h{level}" href="#c{info.index}" title="{_describe(chunk)}"></a>'


def _run(rows: Sequence[_Row]) -> str:
    """Return a run of neighbouring chunks of one state. The first one has its mark."""
    first = rows[0][0].info
    marks = [f"<b>{_MARKS[chunk_state(first)]}{first.index}</b>", *[""] * (len(rows) - 1)]
    return "".join(_span(*row, mark) for row, mark in zip(rows, marks, strict=True))


def _span(chunk: ExplainedChunk, level: int, mark: str) -> str:
    state, index = chunk_state(chunk.info), chunk.info.index
    return f'<span id="c{index}" class="{state} s{level}" title="{_describe(chunk)}">{mark}{escape(chunk.text)}</span>'


def _forced_row(start: int, end: int, reason: str) -> str:
    return f"<tr><td>{start}–{end - 1}</td><td>{escape(reason)}</td></tr>"


def _table_row(chunk: ChunkInfo) -> str:
    state = chunk_state(chunk)
    return (
        f"<tr><td>{chunk.index}</td><td>{chunk.start}–{chunk.end - 1}</td><td>{chunk.score:.3e}</td>"
        f"<td>{chunk.kept_tokens} of {chunk.end - chunk.start}</td><td>{_MARKS[state]} {state}</td></tr>"
    )


def _describe(chunk: ExplainedChunk) -> str:
    info = chunk.info
    return (
        f"chunk {info.index}, tokens {info.start} to {info.end - 1}, score {info.score:.3e}, "
        f"{escape(chunk.reason)}, {info.kept_tokens} of {info.end - info.start} tokens kept"
    )


def _facts(inspection: Inspection, models: str) -> str:
    chunks = inspection.chunks
    kept = sum(chunk.kept for chunk in chunks)
    forced = sum(chunk.kept and chunk.forced for chunk in chunks)
    lead = "The target reads" if inspection.mode == "sparse" else "The target reads everything; sparse, it would read"
    return (
        f"<p>{lead} <strong>{inspection.kept_tokens} of {inspection.prompt_tokens} tokens</strong>: "
        f"{kept} of {len(chunks)} chunks, {forced} of them forced.</p>"
        f"<p>Mode {escape(inspection.mode)}: {escape(inspection.reason)}.</p>"
        f'<p class="faint">{escape(models)}</p>'
    )


def _legend() -> str:
    shades = "".join(f'<span class="swatch s{level}"></span>' for level in range(LEVELS))
    return (
        '<ul class="legend">'
        "<li>✓ underlined: kept for its score</li>"
        "<li>◆ double underline: kept by rule (template, system prompt, last tokens)</li>"
        "<li>✕ italic: dropped, the target never sees it</li>"
        f"<li>{shades} rank of the score, low to high</li>"
        "</ul>"
    )
