"""A document of one's own on the page: it is asked in place of the sample, and what was read of it is shown."""

from __future__ import annotations

import pytest

from tests.support.serving import Server

from ..web.conftest import Page
from ..web.conftest import driver as driver
from ..web.conftest import engine as engine
from ..web.conftest import live as live
from ..web.conftest import page as page
from .conftest import haystack


@pytest.mark.extended
def test_it_is_asked_without_the_sample(page: Page, server: Server) -> None:
    document, question = haystack("Anna", "471128", 900, 0.4, seed=77).rsplit("\n\n", 1)
    page.open(server.base, sample=True)
    page.drop(document, "log.txt")
    assert not page.find("#sample").is_displayed()
    assert page.find("#sample-title").text == "log.txt"
    assert "Sandholm" not in page.find("#sample-text").text
    turn = page.ask(question)
    (arm,) = turn.find_elements("css selector", ".arm")
    assert "471128" in arm.find_element("css selector", ".answer").text
    read = page.run("return [...document.querySelectorAll('#prompt .kept')].map((part) => part.textContent).join('')")
    assert "471128" in read
    assert len(read) < len(document) / 2
    assert "Sandholm" not in page.run("return document.getElementById('prompt').textContent")
