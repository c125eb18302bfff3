"""Files in messages, in all dialects: text is read under its name, of others a note stays; and texts that are odd."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from time import process_time
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specprefill_server.prompt.files import read_media

from .fakes import FakeEngine, FakePair, byte_tokenizer
from .form_templates import FORMS
from .test_history import CHAT, DIALECTS, MESSAGES, RESPONSES, ask, chat, messages, prompt, responses

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 15
PDF = b"%PDF-1.7\n1 0 obj << >> endobj"
ONLY_TEXT, NOT_HERE = "this model reads text only", "its content is not in the request"
NOT_BASE64 = "its Base64 can't be read"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(FakePair(byte_tokenizer(FORMS["all is shown"]), context_length=1 << 20))
    yield fake
    fake.close()


def file_part(path: str, name: str, media_type: str, data: bytes) -> dict[str, Any]:
    encoded = b64encode(data).decode()
    url = f"data:{media_type};base64,{encoded}"
    if path == MESSAGES:
        source = {"type": "base64", "media_type": media_type, "data": encoded}
        return {"type": "document", "title": name, "source": source}
    if path == RESPONSES:
        return {"type": "input_file", "filename": name, "file_data": url}
    return {"type": "file", "file": {"filename": name, "file_data": url}}


def body(path: str, *parts: dict[str, Any], turns: int = 0) -> dict[str, Any]:
    """A user's message with these parts, and further turns behind it."""
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "See"}
    talk: list[dict[str, Any]] = [{"role": "user", "content": [text, *parts]}]
    for i in range(turns):
        talk += [{"role": "assistant", "content": f"answer {i}"}, {"role": "user", "content": f"question {i}"}]
    return {"input": talk} if path == RESPONSES else {"messages": talk, "max_tokens": 9}


def place(path: str) -> str:
    return "input[0].content[1]" if path == RESPONSES else "messages[0].content[1]"


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize(
    ("name", "media_type", "data", "text"),
    [
        ("a.txt", "text/plain", b"hello", "hello"),
        ("a.json", "application/json", b'{"a": 1}', '{"a": 1}'),
        ("a.svg", "image/svg+xml", b"<svg/>", "<svg/>"),
        ("a.py", "application/octet-stream", "x = 'ü'\n".encode(), "x = 'ü'"),
        ("a.txt", "", b"\xef\xbb\xbfwith a mark", "with a mark"),
        ("a.txt", "text/plain", "wide".encode("utf-16"), "wide"),
        ("a.txt", "text/plain", b"a\0b", "a\0b"),
        ("a.txt", "text/plain", b"half \xed\xa0\xbd", "half \ufffd\ufffd\ufffd"),
        ("a.pdf", "application/pdf", PDF, None),
        ("a.png", "image/png", PNG, None),
        ("a.bin", "application/octet-stream", b"a\0b", None),
    ],
)
def test_a_file_is_text_or_a_note(
    client: TestClient, engine: FakeEngine, path: str, name: str, media_type: str, data: bytes, text: str | None
) -> None:
    answer = ask(client, path, body(path, file_part(path, name, media_type, data), turns=10))
    kind = "document" if path == MESSAGES else "file"
    shown = f"[{kind} left out: {ONLY_TEXT}]" if text is None else text
    assert f"See\n{name}\n{shown}" in prompt(engine)
    warnings = [f"{place(path)}: a {kind} was left out: {ONLY_TEXT}"] if text is None else None
    assert answer.get("warnings") == warnings
    assert "question 9" in prompt(engine)


@pytest.mark.parametrize(
    ("path", "part", "shown"),
    [
        (CHAT, {"type": "file", "file": {"file_id": "file-1"}}, f"[file left out: {NOT_HERE}]"),
        (CHAT, {"type": "file", "file": {"filename": "a", "file_data": "the text itself"}}, "a\nthe text itself"),
        (CHAT, {"type": "file", "file": {"file_data": "data:text/plain,two%20words"}}, "two words"),
        (CHAT, {"type": "file", "file": {"file_data": "data:text/plain;base64,?"}}, f"[file left out: {NOT_BASE64}]"),
        (CHAT, {"type": "file", "file": "a"}, f"[file left out: {NOT_HERE}]"),
        (CHAT, {"type": "input_audio", "input_audio": {}}, f"[audio left out: {ONLY_TEXT}]"),
        (RESPONSES, {"type": "input_file", "file_url": "http://x/a"}, f"[file left out: {NOT_HERE}]"),
        (MESSAGES, {"type": "document", "source": {"type": "url"}}, f"[document left out: {NOT_HERE}]"),
        (MESSAGES, {"type": "document", "source": {"type": "text", "data": "hello"}, "title": "a"}, "a\nhello"),
        (
            MESSAGES,
            {
                "type": "document",
                "context": "of May",
                "source": {"type": "content", "content": [{"type": "text", "text": "hi"}, {"type": "image"}]},
            },
            f"of May\nhi\n[image left out: {ONLY_TEXT}]",
        ),
    ],
)
def test_other_shapes(client: TestClient, engine: FakeEngine, path: str, part: dict[str, Any], shown: str) -> None:
    answer = ask(client, path, body(path, part))
    assert f"See\n{shown}<|im_end|>" in prompt(engine)
    assert ("warnings" in answer) == ("left out" in shown)


def encoded(data: str | bytes, charset: str = "utf-8") -> str:
    return b64encode(data.encode(charset) if isinstance(data, str) else data).decode()


YAML = "data:\n  a: 1, b: 2\n"
SOUND = b"\xff\xfe\x90\0abcd" * 5


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        # the head of a URL
        (f"data:application/pdf;BASE64,{encoded(PDF)}", ONLY_TEXT),
        (f"data:application/pdf; base64,{encoded(PDF)}", ONLY_TEXT),
        (f"data:application/pdf;base64;name=a.pdf,{encoded(PDF)}", ONLY_TEXT),
        (f"DATA:Application/PDF;base64,{encoded(PDF)}", ONLY_TEXT),
        (f"data:undefined;base64,{encoded(PDF)}", ONLY_TEXT),
        (f"data:;base64,{encoded('hello')}", "hello"),
        (f"data:application/json; charset=utf-8;base64,{encoded(b'[0, 255] ' + bytes([255]))}", "[0, 255] \ufffd"),
        (f"data:text/plain;base64,{encoded('hello').rstrip('=')}", "hello"),
        ("data:text/plain;base64,abcde", NOT_BASE64),
        ("data:,two%20words", "two words"),
        # character sets and marks
        (f"data:text/plain;charset=ISO-8859-1;base64,{encoded('Grüße', 'latin-1')}", "Grüße"),
        ("data:text/plain;charset=iso-8859-1,Gr%FC%DFe", "Grüße"),
        (f'data:text/plain;charset="utf-16le";base64,{encoded("Grüße", "utf-16-le")}', "Grüße"),
        (f"data:text/plain;charset=punycode;base64,{encoded('Grüße')}", "Grüße"),
        (f"data:text/plain;charset=utf\0;base64,{encoded('Grüße')}", "Grüße"),
        (f"data:text/plain;charset=us-ascii;base64,{encoded('Grüße')}", "Grüße"),
        (f"data:text/plain;base64,{encoded('Grüße', 'utf-32')}", "Grüße"),
        (f"data:;base64,{encoded('Grüße', 'utf-16')}", "Grüße"),
        (f"data:audio/mpeg;base64,{encoded(SOUND)}", ONLY_TEXT),
        # data alone, which may be the text
        (encoded("hello, world"), "hello, world"),
        (encoded(PDF), ONLY_TEXT),
        (encoded(PDF).rstrip("="), ONLY_TEXT),
        (encoded(b"\0\xff"), ONLY_TEXT),
        ("", ""),
        ("Buy milk and eggs", "Buy milk and eggs"),
        ("abcd efgh", "abcd efgh"),
        ("Z" * 131_072, "Z" * 131_072),
        (YAML, YAML),
        ("data: 1, 2", "data: 1, 2"),
        ("data:x,data:y", "data:x,data:y"),
    ],
    ids=lambda text: text[:40],
)
def test_what_a_files_data_says(client: TestClient, engine: FakeEngine, data: str, shown: str) -> None:
    answer = ask(client, CHAT, body(CHAT, {"type": "file", "file": {"filename": "a", "file_data": data}}))
    left_out = shown in (ONLY_TEXT, NOT_BASE64)
    note = f"[file left out: {shown}]" if left_out else shown
    assert "\n".join(filter(None, ("See\na", note))) + "<|im_end|>" in prompt(engine)
    assert ("warnings" in answer) == left_out


def test_an_image_among_a_documents_blocks_is_named(client: TestClient) -> None:
    inner = [{"type": "text", "text": "hi"}, {"type": "image", "source": {}}]
    blocks = [{"type": "document", "source": {"type": "content", "content": inner}}]
    answer = ask(
        client, MESSAGES, body(MESSAGES, {"type": "document", "source": {"type": "content", "content": blocks}})
    )
    at = f"{place(MESSAGES)}.source.content[0].source.content[1]"
    assert answer["warnings"] == [f"{at}: an image was left out: {ONLY_TEXT}"]


def test_a_long_type_takes_no_time() -> None:
    source = {"type": "base64", "media_type": "/-+" * 3_000_000, "data": ""}
    begun = process_time()
    assert read_media({"type": "document", "source": source}) == ("", None)
    assert process_time() - begun < 0.5


def test_a_result_has_files_too(client: TestClient, engine: FakeEngine) -> None:
    given = messages(("c1",))
    part = file_part(MESSAGES, "a.txt", "text/plain", b"hello")
    given["messages"][-1]["content"][0]["content"] = [part, file_part(MESSAGES, "a.pdf", "", PDF)]
    ask(client, MESSAGES, given)
    assert f"a.txt\nhello\na.pdf\n[document left out: {ONLY_TEXT}]<|im_end|>" in prompt(engine)


# --- Odd texts of tools -----------------------------------------------------------------------------------------------

FACT = "the code is 4711"
ODD = {
    "NUL": f"approximately $12,000\0-$18,000, {FACT}",
    "byte order mark": f"\ufeff{FACT}",
    "a picture": f"{PNG[:4096].decode('latin-1')} {FACT}",
    "one letter": "Z" * 131_072 + f" {FACT}",
    "signs": "=" * 131_072 + f" {FACT}",
    "one line": ",".join(f'"k{i}":{i}' for i in range(2500)) + FACT + ",".join(f'"q{i}":{i}' for i in range(2500)),
}


@pytest.mark.parametrize(("path", "shape"), [(CHAT, chat), (MESSAGES, messages), (RESPONSES, responses)])
@pytest.mark.parametrize("text", ODD)
def test_an_odd_result_is_whole(
    client: TestClient, engine: FakeEngine, path: str, shape: Callable[[tuple[str, ...]], dict[str, Any]], text: str
) -> None:
    given = shape(("c1",))
    last = given["input"][-1] if path == RESPONSES else given["messages"][-1]
    if path == MESSAGES:
        last = last["content"][0]
    last["output" if path == RESPONSES else "content"] = ODD[text]
    ask(client, path, given)
    assert ODD[text] in prompt(engine)
