"""Two commits side by side: each in a git worktree of its own, run by this environment's Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import BenchError

__all__ = ["Commit", "checked_out", "uncommitted"]

ROOT = Path(__file__).resolve().parents[3]
WHERE = "import mlx_specprefill as a, mlx_specprefill_server as b; print(a.__file__); print(b.__file__)"


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit and where its files are.

    Attributes:
        name: of the arm; `title`: the first line of its message.
    """

    name: str
    sha: str
    title: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """With which a Python that is told not to look into its own folder (`-P`) imports this commit."""
        return {"PYTHONPATH": os.pathsep.join([str(self.folder), str(self.folder / "server")])}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", *arguments]

    def check(self) -> None:
        """
        Raises:
            BenchError: what is imported lies elsewhere, or can't be.
        """
        environment = {**os.environ, **self.environment}
        done = subprocess.run(
            self.command("-c", WHERE), env=environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise BenchError(f"{self.name}, {self.sha[:12]}, can't be imported: {done.stderr.strip()[-400:]}")
        for file in done.stdout.split():
            if self.folder not in Path(file).parents:
                raise BenchError(f"{self.name}: {file} is imported instead of the files in {self.folder}")


@contextmanager
def checked_out(references: Mapping[str, str], repository: Path = ROOT) -> Iterator[list[Commit]]:
    """The commits in folders, until the block ends.

    Args:
        references: name of the arm -> commit, branch or tag.

    Raises:
        BenchError: one of them is no commit of the repository, or this is no repository.
    """
    found = {name: _git(repository, "rev-parse", "--verify", f"{one}^{{commit}}") for name, one in references.items()}
    with tempfile.TemporaryDirectory(prefix="commits-") as place, ExitStack() as stack:
        commits = []
        for name, sha in found.items():
            folder = Path(place).resolve() / name
            _git(repository, "worktree", "add", "--quiet", "--detach", str(folder), sha)
            stack.callback(_git, repository, "worktree", "remove", "--force", str(folder))
            commits.append(Commit(name, sha, _git(repository, "show", "--no-patch", "--format=%s", sha), folder))
        yield commits


def uncommitted(repository: Path = ROOT) -> bool:
    """Whether there are changes that no commit has."""
    return bool(_git(repository, "status", "--porcelain", "--untracked-files=no"))


def _git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()
