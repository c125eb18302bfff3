"""Hooks of mkdocs.yml: pages that live outside docs/, links to and from them, and nothing from other hosts."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "models").glob("**/README.md")),
)
SEARCHED = {"guides/trouble": 4, "decisions/": 0.2, "results": 0.2, "machines": 0.2, "CHANGELOG": 0.2}  # start: weight
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
FETCHED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]*)")

log = logging.getLogger("mkdocs.docs_hooks")  # below mkdocs, so that --strict counts its warnings


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in OUTSIDE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links across the border of docs/ to the page on the site, and weigh the page for the search.

    Links to other files become plain names.
    """
    source = page.file.src_uri
    for start, boost in SEARCHED.items():
        if source.startswith(start):
            page.meta.setdefault("search", {})["boost"] = boost
    folder = os.path.dirname(source if source in OUTSIDE else f"docs/{source}")

    def replaced(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = os.path.normpath(os.path.join(folder, target))
        if os.path.isdir(ROOT / path):
            path += "/README.md"
        uri = path.removeprefix("docs/")
        if uri != path or path in OUTSIDE:
            return f"{image}[{text}]({os.path.relpath(uri, os.path.dirname(source) or '.')}{anchor or ''})"
        if not os.path.exists(ROOT / path):
            log.warning("%s links to %s, which does not exist", source, target)
        return text

    return LINK.sub(replaced, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warn of a page that would fetch anything from another host. The site is read without a network."""
    for address in FETCHED.findall(output):
        if not (config.site_url and address.startswith(config.site_url)):
            log.warning("%s fetches %s", page.file.src_uri, address)
    return output
