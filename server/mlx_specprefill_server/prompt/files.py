"""Images, files and the like in messages: a file's text stands under its name, and a note for what can't be read.

A refusal would end an agent's session: the part stays in the history of all later requests.
"""

from __future__ import annotations

import codecs
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

MEDIA = {
    "image", "image_url", "input_image", "file", "input_file", "document", "audio", "input_audio", "video",
    "video_url", "input_video", "container_upload",
}  # fmt: skip
_FILES = ("file", "document", "container_upload")
_NOT_TEXT, _NOT_HERE = "this model reads text only", "its content is not in the request"
_NOT_BASE64 = "its Base64 can't be read"
# Text may begin with `data:` too: without parameters a URL's type has a slash.
_URL = re.compile(r"data:([\w.+*/-]{0,128} *;[^,\n]{0,800}|(?:[\w.+*-]{1,64}/[\w.+*-]{1,64})?),", re.IGNORECASE)
_IS_TEXT = re.compile(r"text/.*|.*[/+-](?:json|xml|yaml|toml|javascript|typescript|sql|sh)")
_LONGEST = 1000  # characters of a type and its parameters
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
_UNMARKED = ("audio/", "image/", "video/", "font/")
# Python has codecs for other things than character sets. ASCII is not among these: it is read as UTF-8.
_CHARSETS = ("utf", "iso", "latin", "windows", "cp", "mac", "koi8", "gb", "big5", "euc", "shift")
_MAGIC = (b"%PDF-", b"\x89PNG", b"\xff\xd8\xff", b"PK\3\4", b"\x1f\x8b")


def read_media(part: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the text that stands for a part of a type in MEDIA or a tool's result, and why it is not its own."""
    kind = _kind(part)[:40]
    if kind not in _FILES:
        return f"[{kind} left out: {_NOT_TEXT}]", _NOT_TEXT
    inner, source = _object(part.get("file")) or part, _object(part.get("source"))
    if (blocks := _blocks(part)) is not None:
        texts = (_string(b.get("text")) if b["type"] == "text" else read_media(b)[0] for _, b in blocks)
        shown, why = "\n".join(texts), None
    else:
        shown, why = _text(inner, source)
    name = _string(inner.get("filename")) or _string(part.get("title"))
    shown = shown if why is None else f"[{kind} left out: {why}]"
    return "\n".join(filter(None, (name, _string(part.get("context")), shown))), why


def unread_media(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield a sentence for each part whose text is a note. Each comes with its path."""
    for path, part in parts:
        if part["type"] not in MEDIA:
            continue
        if (blocks := _blocks(part)) is not None:
            yield from unread_media((f"{path}.source.content[{i}]", block) for i, block in blocks)
        elif (why := read_media(part)[1]) is not None:
            kind = _kind(part)
            yield f"{path}: {'an' if kind[0] in 'ai' else 'a'} {kind} was left out: {why}"


def _kind(part: Mapping[str, Any]) -> str:
    return str(part["type"]).removeprefix("input_").removesuffix("_url")


def _blocks(part: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]] | None:
    """Return the blocks of a document that is made of them, each with its place. None: it is no such document."""
    source = _object(part.get("source"))
    content = source.get("content")
    if _kind(part) not in _FILES or source.get("type") != "content" or not isinstance(content, str | list):
        return None
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [(i, b) for i, b in enumerate(blocks) if isinstance(b, dict) and isinstance(b.get("type"), str)]


def _text(inner: Mapping[str, Any], source: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the text of a file's data, and why it has none."""
    data = source.get("data") if inner.get("file_data") is None else inner["file_data"]
    if not isinstance(data, str):
        return "", _NOT_HERE
    if source.get("type") == "text":
        return data, None
    media_type = _string(source.get("media_type"))
    if (url := _URL.match(data)) is not None:
        media_type, data = url[1], data[url.end() :]
    kind, *parameters = (word.strip() for word in media_type[:_LONGEST].lower().split(";"))
    may_be_own = url is None and not source  # without a type: Base64, or a client's own text
    try:
        content = unquote_to_bytes(data) if url is not None and "base64" not in parameters else _from_base64(data)
    except ValueError:
        return (data, None) if may_be_own else ("", _NOT_BASE64)
    text = _decoded(content, kind, parameters)
    if text is None and may_be_own and not _is_binary(content):
        text = data
    return (text, None) if text is not None else ("", _NOT_TEXT)


def _from_base64(data: str) -> bytes:
    """Return the bytes, also if padding is missing or blanks stand between; a ValueError if it is something else."""
    letters = "".join(data.split())
    return b64decode(letters + "=" * (-len(letters) % 4), validate=True)


def _decoded(data: bytes, kind: str, parameters: Iterable[str]) -> str | None:
    """Return the text of bytes, without a byte order mark. None: neither their type nor they say that they are one."""
    is_text = _IS_TEXT.fullmatch(kind) is not None
    marks = {} if kind.startswith(_UNMARKED) and not is_text else _MARKS
    marked = next((encoding for mark, encoding in marks.items() if data.startswith(mark)), None)
    if is_text:
        return data.decode(marked or _charset(parameters), "replace").removeprefix("\ufeff")
    if marked is None and _is_binary(data):
        return None
    try:
        return data.decode(marked or "utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return None


def _is_binary(data: bytes) -> bool:
    return data.startswith(_MAGIC) or b"\0" in data


def _charset(parameters: Iterable[str]) -> str:
    """Return Python's name for the character set that a type names, else UTF-8."""
    given = next((word[8:].strip(" \"'") for word in parameters if word.startswith("charset=")), "")
    try:
        return codecs.lookup(given).name if given.startswith(_CHARSETS) else "utf-8"
    except (LookupError, ValueError):
        return "utf-8"


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""
