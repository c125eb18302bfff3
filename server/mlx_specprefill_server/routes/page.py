"""The page at / with its files and security headers.

The files are read once, and nothing else is ever served from the disk.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from ..http.errors import ApiError

router = APIRouter(include_in_schema=False)

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml",
         "txt": "text/plain"}  # fmt: skip
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
WEB = files("mlx_specprefill_server") / "web"
# By their path below /web/, without licences and notes.
FILES = {
    prefix + file.name: file.read_bytes()
    for prefix, folder in (("", WEB), ("vendor/", WEB / "vendor"))
    for file in folder.iterdir()
    if file.name.rpartition(".")[2] in TYPES
}


@router.get("/")
async def index() -> Response:
    """Return the page."""
    return _file("index.html")


@router.get("/web/{name:path}")
async def part(name: str) -> Response:
    """Return a script, a style or an image of the page."""
    if name not in FILES:
        raise ApiError(404, "Not Found", code="unknown_url")
    return _file(name)


def _file(name: str) -> Response:
    return Response(FILES[name], media_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)
