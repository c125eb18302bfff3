"""Documents: which ones are sent, which are refused, and what fits."""

from __future__ import annotations

import re

import pytest

from ..server.fakes import FakeEngine
from .conftest import Page


def heard(engine: FakeEngine, number: int = -1) -> str:
    """The prompt of a request, as text."""
    asked = [request for request in engine.requests if request.max_tokens > 1]  # the others are explanations
    return str(engine.pair.tokenizer.decode(asked[number].prompt.tolist()))


def pdf(*pages: str) -> bytes:
    """A file of one line per page."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {len(pages)}/Kids[{kids}]>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
    ]
    for i, line in enumerate(pages):
        show = f"BT /F 12 Tf 20 100 Td ({line}) Tj ET"
        box = "/MediaBox[0 0 400 200]/Resources<</Font<</F 3 0 R>>>>"
        objects.append(f"<</Type/Page/Parent 2 0 R{box}/Contents {5 + 2 * i} 0 R>>")
        objects.append(f"<</Length {len(show)}>>stream\n{show}\nendstream")
    data, places = b"%PDF-1.4\n", []
    for number, written in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj {written} endobj\n".encode("latin-1")
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    end = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer<</Size {len(objects) + 1}/Root 1 0 R>>\n"
    return data + end.encode() + f"startxref\n{len(data)}\n%%EOF".encode()


def test_a_pdf_becomes_its_text(page: Page, engine: FakeEngine) -> None:
    page.drop(pdf("The code is 471128.", "Caf\xe9 closed."), "paper.pdf")
    page.find(".chip .name").click()
    assert page.find("#preview-title").text == "paper.pdf"
    assert page.find("#preview-text").text == "The code is 471128.\n\nCaf\xe9 closed."
    page.find("#preview button").click()
    page.ask("What is the code?")
    assert "The code is 471128.\n\nCaf\xe9 closed.\n\nWhat is the code?" in heard(engine)


def test_a_document_that_comes_later_goes_with_the_next_question(page: Page, engine: FakeEngine) -> None:
    page.drop("The first text.", "first.txt")
    page.ask("What does it say?")
    assert page.all("#documents .chip") == []
    page.drop("Quite another text.", "second.txt")
    turn = page.ask("And this one?")
    assert "second.txt" in turn.find_element("css selector", ".chips").text
    second = heard(engine)
    assert second.count("The first text.") == second.count("Quite another text.") == 1
    assert second.index("The first text.") < second.index("Quite another text.") < second.index("And this one?")


def test_several_documents_are_told_apart_and_can_be_taken_away(page: Page, engine: FakeEngine) -> None:
    for name in ("one", "two", "three"):
        page.drop(f"The text of {name}.", f"{name}.md")
    page.find("[aria-label='Remove two.md']").click()
    page.ask("Which is longer?")
    assert "one.md\n\nThe text of one.\n\nthree.md\n\nThe text of three.\n\nWhich is longer?" in heard(engine)
    assert "two" not in heard(engine)


def test_what_is_typed_counts_at_once(page: Page, engine: FakeEngine) -> None:
    assert page.find("#room").text == ""
    page.find("#question").send_keys("twelve chars")
    page.until(lambda: page.find("#room").text == "12 of 100,000 tokens")
    page.drop("A line of words.")
    page.until(lambda: page.find("#room").text == "28 of 100,000 tokens")
    page.press("#send")
    page.until(lambda: "of 100,000 tokens" in page.find("#room").text)  # what a next question begins with
    page.set("#question", "x" * 99_990)
    page.until(lambda: "Too long by" in page.find("#excess").text)
    assert not page.find("#send").is_enabled()
    assert not page.find("#shorten").is_displayed()  # no document is there to be shortened


def test_what_is_too_long_is_said_before_it_is_asked_and_can_be_shortened(page: Page, engine: FakeEngine) -> None:
    page.drop("A line of words.\n" * 12_000)  # 204 KB, as many tokens here; the window holds 100,000
    assert "Too long by" in page.find("#excess").text
    assert "100,000 tokens" in page.find("#excess").text
    assert not page.find("#send").is_enabled()
    page.find("#shorten").click()
    page.until(lambda: page.find("#send").is_enabled())
    assert "(beginning)" in page.find("#documents").text
    page.ask("What is it?")
    assert 50_000 < len(heard(engine)) < 100_000
    page.driver.get_log("browser")  # it notes the refusal of the server to count all of it


def test_the_servers_own_refusal_of_a_length_leaves_no_card(page: Page, engine: FakeEngine) -> None:
    page.run("const serve = fetch; window.fetch = (path, options) => path === '/tokenize' ? "
             "Promise.resolve(new Response('{\"count\": 1}')) : serve(path, options)")  # fmt: skip
    page.drop("words " * 20_000)
    page.find("#question").send_keys("Hello")
    page.press("#send")
    assert "longer than the model's window" in page.find("#notice").text
    assert page.all(".turn") == []
    assert page.find("#question").get_property("value") == "Hello"
    page.driver.get_log("browser")


@pytest.mark.parametrize(
    ("data", "name", "says"),
    [
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj", "paper.pdf", "The PDF paper.pdf can't be read"),
        pytest.param(
            b"%PDF-1.4 all of it letters", "letter.txt", "The PDF letter.txt can't be read", marks=pytest.mark.nightly
        ),
        (pdf(""), "scan.pdf", "The PDF scan.pdf has no text in it"),
        (bytes(range(256)) * 4, "photo.jpg", "photo.jpg is not a text file"),
        pytest.param(b"text\0with zeros", "core", "core is not a text file", marks=pytest.mark.nightly),
        (b"  \n", "empty.txt", "has no text"),
    ],
)
def test_what_is_no_text_is_refused(page: Page, data: bytes, name: str, says: str) -> None:
    page.drop(data, name)
    assert says in page.find("#notice").text
    assert page.all("#documents .chip") == []


def test_html_source_and_wide_encodings_become_text(page: Page, engine: FakeEngine) -> None:
    page.drop("<title>no</title><style>p{}</style><h1>Head</h1><p>A &amp; B</p><script>alert(1)</script>", "page.html")
    page.drop("def f(x):\r\n    return x\r\n", "code.py")
    page.drop("\ufeffgr\xfc\xdfe".encode("utf-16-le"), "wide.txt")
    for encoding in ("utf-16-le", "utf-16-be", "latin-1", "cp1252"):
        page.drop(f"gr\xfc\xdfe in {encoding}".encode(encoding), f"{encoding}.txt")
    page.ask("Well?")
    said = heard(engine)
    for encoding in ("utf-16-le", "utf-16-be", "latin-1", "cp1252"):
        assert f"{encoding}.txt\n\ngr\xfc\xdfe in {encoding}\n" in said
    assert "page.html\n\nHead\nA & B\n" in said
    assert "code.py\n\ndef f(x):\n    return x\n" in said
    assert "wide.txt\n\ngr\xfc\xdfe\n" in said
    assert "alert" not in said
    page.driver.get_log(
        "browser"
    )  # it notes that the page's policy keeps the style of the HTML file from being applied


def test_a_long_paste_becomes_a_document(page: Page, engine: FakeEngine) -> None:
    paste = (
        "const data = new DataTransfer(); data.setData('text/plain', arguments[0]);"
        "return document.getElementById('question').dispatchEvent("
        "  new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true}))"
    )
    assert page.run(paste, "a short one")  # goes into the field, as ever
    assert not page.run(paste, "a long one. " * 300)
    page.until(lambda: "3,600 tokens" in page.find("#documents").text)
    assert "of 100,000 tokens" in page.find("#room").text
    page.ask("What?")
    assert "a long one. a long one." in heard(engine)
    for text in ("Line by line. " * 200 + "\n\nWho was it?\n", "Who was it?\n" + "Line by line. " * 200):
        page.run(paste, text)  # a text with its question
        page.until(lambda: page.find("#question").get_property("value") == "Who was it?")
        page.ask("")
        assert re.search(r"Line by line\.\n\nWho was it\?<", heard(engine))


def test_megabytes_leave_the_page_alive(page: Page) -> None:
    longest = """
      const [began, done] = [performance.now(), arguments[0]];
      let last = began, most = 0;
      const look = () => {
        const now = performance.now();
        [most, last] = [Math.max(most, now - last), now];
        if (now - began < 5000) setTimeout(look, 10); else done(most);
      };
      const files = new DataTransfer();
      files.items.add(new File(["Line by line. ".repeat(750_000)], "large.txt"));
      document.dispatchEvent(new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true }));
      setTimeout(look, 10);
    """
    assert page.driver.execute_async_script(longest) < 1500  # milliseconds without a sign of life
    assert "more characters" in page.find("#sample-text").text
    assert all("/tokenize" in line for line in page.complaints())  # too long to be counted


def test_a_document_is_shown_before_anything_is_asked(page: Page) -> None:
    assert "Sandholm" in page.find("#sample-text").text
    page.drop("Line by line. " * 200, "mine.txt")
    assert page.find("#sample-title").text == "mine.txt"
    assert page.find("#sample-text").text.startswith("Line by line.")
    assert page.find("#sample-text").is_displayed()
    assert not page.find("#map").is_displayed()
    page.ask("What is it?")
    assert page.find("#map").is_displayed()
    assert not page.find("#sample-text").is_displayed()


def test_a_file_that_is_dropped_twice_is_one(page: Page) -> None:
    page.drop("The text.", "mine.txt")
    page.drop("The text.", "mine.txt")
    assert page.find("#notice").text == "mine.txt is here already."
    page.drop("Another text.", "mine.txt")
    assert len(page.all("#documents .chip")) == 2


def test_a_file_is_caught_wherever_it_is_dropped(page: Page) -> None:
    page.run(
        "const files = new DataTransfer(); files.items.add(new File(['The text.'], 'mine.txt'));"
        "window.caught = !document.querySelector('header').dispatchEvent("
        "  new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true}))"
    )
    assert page.run("return window.caught"), "the browser would open the file"
    page.until(lambda: len(page.all("#documents .chip")) == 1)
