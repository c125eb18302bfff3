"""The page on the pair that is served by default: a real model, whose first layers score in place of a draft."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving import Server, start_named

from .conftest import Page

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("default") / "log"
    with start_named(log, "smollm2", "--specprefill-threshold", "512") as running:
        yield running


@pytest.mark.timeout(900)
def test_the_sample_has_its_headline_and_the_next_question_reads_little(page: Page, server: Server) -> None:
    page.open(server.base, sample=True)
    page.press("#sample", within=600)
    said = r"First word after [\d.]+ m?s instead of [\d.]+ m?s\. (79|80) % of the document was not read\. Same answer\."
    assert re.fullmatch(said, page.find(".headline").text)
    assert all("482913" in arm.text for arm in page.all(".arm"))
    sparse, full = (lane.text for lane in page.all(".lane .legend"))
    assert re.match(r"(waiting .+ )?first layers read .+ choosing .+ model reads .+ answer ", sparse.replace("\n", " "))
    assert "\nmodel reads " in f"\n{full}"
    assert "482913" in page.run(
        "return [...document.querySelectorAll('#prompt .kept')].map((s) => s.textContent).join('')"
    )
    for words in ("1851", "Anders Holm"):
        page.find("#more button").click()
        page.until(lambda: page.find("#send").is_displayed(), 600)
        again = page.all(".turn")[-1]
        assert words in again.text
    known, kept = re.search(r"Already read: ([\d,]+) of ([\d,]+) tokens\.", again.text).groups()
    assert int(known.replace(",", "")) > 0.5 * int(kept.replace(",", ""))
