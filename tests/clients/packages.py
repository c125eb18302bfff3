"""Real agents from npm and PyPI, in a folder that is kept between runs, started with no network but the server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlx_specprefill_server.cli.agents.setup import LAUNCHED
from tests.support.connected import paste

HOME = Path(__file__).parents[2] / ".agents"  # 2 GB with all of them
INSTALL = "MLX_SPECPREFILL_TEST_AGENTS"  # set: those that are missing are installed
NOWHERE = "http://127.0.0.1:9"  # as a proxy: whatever is not the server can't be reached
PATIENCE_S = 600
LAUNCHER = ("-m", "mlx_specprefill_server")


@dataclass(frozen=True)
class Package:
    """An agent as its package manager knows it, and how it is told to do one thing.

    Attributes:
        script: the one that the model recites for it.
        proxied: False: it would ask a proxy for the server, too.
    """

    name: str
    package: str
    version: str
    program: str
    options: tuple[str, ...]
    script: str
    requests: int
    environment: Mapping[str, str] = field(default_factory=dict)
    proxied: bool = True

    @property
    def folder(self) -> Path:
        return HOME / f"{self.name}-{self.version}"

    def installed(self) -> Path:
        """Its program; skips where it isn't installed and is not to be."""
        program = self.folder / ("bin" if self.package == "aider-chat" else "node_modules/.bin") / self.program
        if not program.exists():
            if not os.environ.get(INSTALL):
                pytest.skip(f"{self.name} {self.version} is not in {HOME}; {INSTALL}=1 installs it")
            self._install()
        return program

    def _install(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.package == "aider-chat":
            subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
            pip = (str(self.folder / "bin" / "pip"), "install", "--quiet")
            subprocess.run([*pip, f"{self.package}=={self.version}"], check=True)
            return
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        quiet = ("--no-fund", "--no-audit", "--loglevel=error")
        subprocess.run(["npm", "install", *quiet, f"{self.package}@{self.version}"], cwd=self.folder, check=True)

    def run(self, home: Path, work: Path, prompt: str, *options: str) -> str:
        """Return the agent's output for a prompt. `options` are those of `launch` and `connect`."""
        done = self.ended(home, work, prompt, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def ended(
        self,
        home: Path,
        work: Path,
        prompt: str,
        *options: str,
        patience: float = PATIENCE_S,
        launcher: Sequence[str] = LAUNCHER,
    ) -> subprocess.CompletedProcess[str]:
        """The same, however it ends."""
        environment = {"HOME": str(home), "NO_PROXY": "127.0.0.1", **self.environment}
        environment |= {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH")}
        if self.proxied:
            environment |= {"HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE}
        program = self.installed()
        command = [str(program), *self.options, prompt]
        if self.name in LAUNCHED:
            environment["PATH"] = f"{program.parent}:{environment['PATH']}"
            command = [sys.executable, *launcher, "launch", self.name, *options, "--", *command[1:]]
        else:
            connect(home, self.name, *options)
        return subprocess.run(
            command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=patience,
        )


_CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_AIDER = ("--yes-always", "--no-git", "--no-check-update", "--no-analytics", "--no-browser", "--message")
_OFFLINE = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}

PACKAGES = {
    package.name: package
    for package in (
        Package("codex", "@openai/codex", "0.169.0", "codex", _CODEX, "codex", 3),
        Package("opencode", "opencode-ai", "1.18.33", "opencode", ("run",), "opencode", 4, _OFFLINE),  # and a title
        Package(
            "claude", "@anthropic-ai/claude-code", "2.1.330", "claude", ("--allowedTools=Bash,Edit", "-p"), "claude", 3
        ),
        Package("qwen", "@qwen-code/qwen-code", "0.15.10", "qwen", ("-y", "-p"), "qwen", 4, proxied=False),
        Package("pi", "@mariozechner/pi-coding-agent", "0.73.1", "pi", ("--offline", "-p"), "pi", 3),
        Package("cline", "cline", "3.0.65", "cline", (), "cline", 2),
        Package("continue", "@continuedev/cli", "1.5.47", "cn", ("--auto", "-p"), "continue", 2),
        Package("aider", "aider-chat", "0.86.2", "aider", _AIDER, "text", 1),
    )
}


def connect(home: Path, agent: str, *options: str) -> None:
    """Put what `connect` prints into the files of this home."""
    command = [sys.executable, "-m", "mlx_specprefill_server", "connect", agent, *options]
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH")}
    done = subprocess.run(command, env=kept | {"HOME": str(home)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    paste(done.stdout, home)
