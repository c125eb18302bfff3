#!/usr/bin/env python3
"""Install a wheel or an sdist as a new user would, and use it: from an empty folder, outside the repository, offline.

    scripts/try_install.py dist/mlx_specprefill-0.1.0-py3-none-any.whl            with pip, into a new environment
    scripts/try_install.py dist/mlx_specprefill-0.1.0.tar.gz --installer uv       with `uv tool install`

The installation may fetch dependencies. What follows may not: `mlx-specprefill serve` without arguments has to
serve the bundled pair and the page, and answer a question after a sparse prefill. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INSTALLERS = ("pip", "uv")
NOWHERE = "http://127.0.0.1:9"  # a proxy that does not exist: whatever wants to leave this machine fails
START_S = 240
CODE = "471128"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artefact", type=Path, help="a wheel or an sdist")
    parser.add_argument("--installer", choices=INSTALLERS, default="pip")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(try_install(options.artefact.resolve(), options.installer, Path(folder)))


def try_install(artefact: Path, installer: str, folder: Path) -> str:
    """Install below `folder`, serve, ask; what the answer was. Raises AssertionError where something is not right."""
    return use(install(artefact, installer, folder), artefact, folder)


def use(command: Path, artefact: Path, folder: Path) -> str:
    """Use the installation from an empty folder below `folder`, without a network, and return a summary."""
    empty = folder / "empty"
    empty.mkdir()
    environment = offline(folder)
    version = subprocess.check_output([command, "--version"], env=environment, cwd=empty, text=True).strip()
    assert version.split()[-1] == artefact.name.split("-")[1].removesuffix(".tar.gz"), version
    with served(command, environment, empty, folder / "log") as base:
        fetched = page(base)
        answer = ask(base)
    assert list(empty.iterdir()) == [], "it wrote into the folder that it was started in"
    return f"{version}: {len(fetched)} files of the page; {answer}"


def install(artefact: Path, installer: str, folder: Path) -> Path:
    """The path of the installed command."""
    if installer == "uv":
        uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        assert uv is not None, "uv is not on PATH"
        places = {"UV_TOOL_DIR": str(folder / "tools"), "UV_TOOL_BIN_DIR": str(folder / "bin")}
        command = [uv, "tool", "install", "--quiet", "--python", sys.executable, str(artefact)]
        subprocess.run(command, env={**os.environ, **places}, cwd=folder, check=True)
        return folder / "bin" / "mlx-specprefill"
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    command = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--no-compile", str(artefact)]
    subprocess.run(command, cwd=folder, check=True)
    return programs / "mlx-specprefill"


def offline(folder: Path) -> dict[str, str]:
    """Nothing of the caller's Python, settings and home, and no way out of this machine."""
    foreign = ("MLX_SPECPREFILL_", "PYTHON", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    home = folder / "home"
    home.mkdir()
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    return {**kept, **proxies, "no_proxy": "127.0.0.1", "HOME": str(home), "PIP_NO_INDEX": "1", "PIP_RETRIES": "0"}


@contextmanager
def served(command: Path, environment: Mapping[str, str], cwd: Path, log: Path) -> Iterator[str]:
    """The address of `mlx-specprefill serve` on a free port."""
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [command, "serve", "--port", "0"], stdout=out, stderr=out, env=environment, cwd=cwd
        ) as process,
    ):
        try:
            yield address(process, log)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            finally:
                process.kill()


def address(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + START_S
    while (found := re.search(r"running on (\S+) ", log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.2)
    return found[1]


def page(base: str) -> list[str]:
    """The files that the page names, each of which has to be there."""
    text = fetch(f"{base}/").decode()
    named = sorted(set(re.findall(r'(?:src|href)="(/[^"#]+)"', text)))
    assert any(name.endswith(".js") for name in named), text
    assert any(name.endswith(".css") for name in named), text
    for name in named:
        assert fetch(base + name), name
    return named


def ask(base: str) -> str:
    """A fact out of a text, after a sparse prefill."""
    log = [f"On day {day} the ship sailed {day * 7 % 50} miles and met nobody." for day in range(120)]
    log.insert(40, f"The secret code for Anna is {CODE}.")
    question = "\n".join(log) + "\n\nWhat is the secret code for Anna?"
    body = {"messages": [{"role": "user", "content": question}], "specprefill": True}
    answer: dict[str, Any] = json.loads(fetch(f"{base}/v1/chat/completions", json.dumps(body).encode()))
    said, report = answer["choices"][0]["message"]["content"], answer["specprefill"]
    assert CODE in said, said
    assert report["mode"] == "sparse", report
    return f"{answer['model']} read {report['kept_tokens']} of {report['prompt_tokens']} tokens: {said}"


def fetch(url: str, data: bytes | None = None) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=120) as answer:
        assert answer.status == 200
        body: bytes = answer.read()
    return body


if __name__ == "__main__":
    main()
