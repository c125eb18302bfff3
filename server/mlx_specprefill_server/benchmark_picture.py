"""A measurement as a picture: two bars per prompt length on one axis of seconds, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

__all__ = ["picture"]

_WIDTH, _LEFT, _RIGHT, _TOP = 760, 110, 170, 64
_BAR, _GAP = 18, 20
_COLOURS = {"full": "#9aa0a6", "sparse": "#0b6e4f"}


def picture(measured: Mapping[str, Any]) -> str:
    """Return the SVG document of a record that `benchmark.record` made."""
    rows = measured["rows"]
    height = _TOP + len(rows) * (2 * _BAR + _GAP) + 12
    longest = max(row["full_s"] for row in rows)
    body = "\n".join([*_heading(measured), *(line for i, row in enumerate(rows) for line in _bars(i, row, longest))])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img">\n'
        f'<title>Time to the first token, full and sparse</title>\n<rect width="100%" height="100%" fill="#fff"/>\n'
        f"{body}\n</svg>\n"
    )


def _heading(measured: Mapping[str, Any]) -> Iterator[str]:
    machine, keep = measured["machine"], measured["keep"]
    share = keep if isinstance(keep, str) else f"{keep:.0%}"
    busy = ", busy" if machine["busy"] else ""
    title = f"{measured['pair']['name']} on {machine['name']}, {machine['cores']} cores{busy}"
    yield f'<text x="16" y="24" font-size="16" font-weight="600">{escape(title)}</text>'
    yield (
        f'<text x="16" y="44" fill="#555">Seconds to the first token, <tspan fill="{_COLOURS["full"]}" '
        f'font-weight="600">full</tspan> and <tspan fill="{_COLOURS["sparse"]}" font-weight="600">sparse</tspan>, '
        f"keep {escape(share)}</text>"
    )


def _bars(index: int, row: Mapping[str, Any], longest: float) -> Iterator[str]:
    top = _TOP + index * (2 * _BAR + _GAP)
    yield f'<text x="{_LEFT - 10}" y="{top + _BAR + 4}" text-anchor="end">{row["tokens"]:,} tokens</text>'
    for i, arm in enumerate(("full", "sparse")):
        y, seconds = top + i * _BAR, row[f"{arm}_s"]
        width = max(1.0, seconds / longest * (_WIDTH - _LEFT - _RIGHT))
        gain = f", {row['speedup']:.1f} times sooner" if arm == "sparse" else ""
        yield f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" fill="{_COLOURS[arm]}"/>'
        yield f'<text x="{_LEFT + width + 6:.1f}" y="{y + _BAR - 5}">{seconds:.3g}{gain}</text>'
