"""Images, files and the like in messages: a file's text stands under its name, and a note for what can't be read.

A refusal would end an agent's session: the part stays in the history of all later requests.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

MEDIA = {
    "image", "image_url", "input_image", "file", "input_file", "document", "audio", "input_audio", "video",
    "video_url", "input_video",
}  # fmt: skip
_FILES = ("file", "document")
_IS_TEXT = re.compile(r"text/|.*[/+-](?:json|xml|yaml|toml|javascript|typescript|sql|sh)$", re.IGNORECASE)
_NOT_TEXT, _NOT_HERE = "this model reads text only", "its content is not in the request"
_PDF = b"%PDF-"


def read_media(part: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the text that stands for a part of a type in MEDIA or a tool's result, and why it is not its own."""
    kind = str(part["type"]).removeprefix("input_").removesuffix("_url")[:40]
    if kind not in _FILES:
        return f"[{kind} left out: {_NOT_TEXT}]", _NOT_TEXT
    inner, source = _object(part.get("file")) or part, _object(part.get("source"))
    text = _content(source.get("content")) if source.get("type") == "content" else _text(inner, source)
    has_data = isinstance(inner.get("file_data") or source.get("data"), str)
    why = None if text is not None else _NOT_TEXT if has_data else _NOT_HERE
    name = _string(inner.get("filename")) or _string(part.get("title"))
    shown = text if why is None else f"[{kind} left out: {why}]"
    return "\n".join(filter(None, (name, _string(part.get("context")), shown))), why


def unread_media(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield a sentence for each part whose text is a note. Each comes with its path."""
    for path, part in parts:
        if part["type"] in MEDIA and (why := read_media(part)[1]) is not None:
            kind = part["type"].removeprefix("input_").removesuffix("_url")
            yield f"{path}: {'an' if kind[0] in 'ai' else 'a'} {kind} was left out: {why}"


def _text(inner: Mapping[str, Any], source: Mapping[str, Any]) -> str | None:
    """Return the text of a file's data, None if it is no text."""
    data = inner.get("file_data") or source.get("data")
    if not isinstance(data, str) or source.get("type") == "text":
        return data if isinstance(data, str) else None
    head, media_type = "", _string(source.get("media_type"))
    if data.startswith("data:"):
        head, _, data = data.partition(",")
        media_type = head.removeprefix("data:").partition(";")[0]
        if not head.endswith(";base64"):
            return _decoded(unquote_to_bytes(data), media_type)
    try:
        return _decoded(b64decode("".join(data.split()), validate=True), media_type)
    except ValueError:
        return None if head or source else data  # a client's own text


def _decoded(data: bytes, media_type: str) -> str | None:
    """Return the text of bytes, without a byte order mark. None: neither their type nor they say that they are one."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")
    if _IS_TEXT.match(media_type):
        return data.decode("utf-8-sig", "replace")
    try:
        return None if b"\0" in data or data.startswith(_PDF) else data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _content(value: Any) -> str | None:
    """Return the text of a document that is made of blocks."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else None
    blocks = [block for block in value if isinstance(block, dict) and isinstance(block.get("type"), str)]
    return "\n".join(_string(b.get("text")) if b["type"] == "text" else read_media(b)[0] for b in blocks)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""
