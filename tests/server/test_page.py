"""The page's files and the headers that they come with."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from mlx_specprefill_server.routes.page import FILES

from .conftest import client_of
from .fakes import FakeEngine


@pytest.mark.parametrize("path", ["/", *(f"/web/{name}" for name in FILES)])
def test_every_file_is_served_without_a_key_and_under_a_strict_policy(engine: FakeEngine, path: str) -> None:
    response = client_of(engine, api_keys=("geheim",)).get(path)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["missing.js", "..%2Fauth.py", "%2e%2e/auth.py", ""])
def test_nothing_else_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/web/{name}").status_code == 404


def test_the_page_asks_no_other_host_and_writes_no_markup() -> None:
    for name, content in FILES.items():
        text = content.decode()
        if name not in ("icon.svg", "plots.js") and not name.startswith("vendor/"):  # namespaces and comments: names
            assert not re.search(r"(https?:)?//[a-z]+\.", text), name
        if not name.startswith("vendor/"):
            assert "innerHTML" not in text
            assert "insertAdjacentHTML" not in text
    page = FILES["index.html"].decode()
    for used in re.findall(r'(?:src|href)="(/web/[^"]+)"', page):
        assert used.removeprefix("/web/") in FILES
    assert not re.search(r"<script>|<style|\sstyle=|\son[a-z]+=", page)
