"""The text's colours: readable at rest, in every step, and on the way from one step to the next."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Page

LEAST = 4.5  # WCAG 2.2, AA, for text of this size
CONTRASTS = """
const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const paint = (...layers) => {
  for (pen.fillStyle of layers) pen.fillRect(0, 0, 1, 1);
  return pen.getImageData(0, 0, 1, 1).data;
};
const light = (...layers) => {
  const [r, g, b] = [...paint(...layers)].map((one) => one / 255)
    .map((x) => (x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4));
  return .2126 * r + .7152 * g + .0722 * b;
};
const list = document.getElementById("prompt");
const desk = getComputedStyle(list).backgroundColor; // what is translucent lies on it
const seen = new Map();
window.contrast = (span) => {
  const { color, backgroundColor } = getComputedStyle(span);
  const pair = `${color} on ${backgroundColor}`;
  if (!seen.has(pair)) {
    const [low, high] = [light(color), light(desk, backgroundColor)].sort((one, other) => one - other);
    seen.set(pair, (high + .05) / (low + .05));
  }
  return seen.get(pair);
};
"""
ALL_COMBINATIONS = """
const list = document.getElementById("prompt"), [span] = list.querySelectorAll("[data-index]"), found = {};
for (const scores of ["yes", "no"]) for (const plain of ["yes", "no"]) {
  Object.assign(list.dataset, { scores, plain });
  for (const state of ["kept", "always", "dropped"]) for (const level of [0, 1, 2, 3, 4, 5]) {
    span.className = `${state} s${level}`;
    found[`scores ${scores}, plain ${plain}, ${span.className}`] = contrast(span);
  }
}
return found;
"""


def scored(page: Page, live: Any, theme: str) -> None:
    """A text with its scores, in one of the themes."""
    base, _ = live()
    page.open(base)
    page.look(theme)
    page.score("Where?", "The river waited for the stone bridge. " * 20)
    page.run(CONTRASTS)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_part_is_readable_with_every_score(page: Page, live: Any, theme: str) -> None:
    scored(page, live, theme)
    found = page.run(ALL_COMBINATIONS)
    assert len(found) == 72
    assert {what: ratio for what, ratio in found.items() if ratio < LEAST} == {}
