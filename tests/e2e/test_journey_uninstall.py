"""An uninstall leaves what the page on trouble says, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "trouble.md"


@pytest.mark.extended
def test_all_that_was_written_lies_in_the_folders_that_the_page_names(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "prompt.txt").write_text("The code of Paris is 4711. What is the code of Paris?")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLX_SPECPREFILL_")}
    environment |= {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mlx_specprefill_server", "inspect", "--pair", "demo"]
    command += ["--prompt-file", str(tmp_path / "prompt.txt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)
    assert "tokens kept" in done.stdout
    named = {home / ".cache" / "mlx-specprefill", home / ".config" / "mlx-specprefill"}
    assert all(f"rm -r ~/{folder.relative_to(home)} " in PAGE.read_text(encoding="utf-8") for folder in named)
    written = [path for path in home.rglob("*") if path.is_file()]
    assert [path for path in written if not any(folder in path.parents for folder in named)] == []
