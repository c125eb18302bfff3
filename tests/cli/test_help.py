"""The text of `--help`, and the completions of a shell."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mlx_specprefill_server import cli
from mlx_specprefill_server.__main__ import main as console_main
from mlx_specprefill_server.cli.serve.options import GROUPS
from mlx_specprefill_server.settings.server import Settings


def serve_command() -> Any:
    group: Any = typer.main.get_command(cli.app)
    return group.commands["serve"]


@pytest.fixture(scope="module")
def text() -> str:
    done = CliRunner(env={"COLUMNS": "400"}).invoke(cli.app, ["serve", "--help"])
    assert done.exit_code == 0
    return " ".join(done.stdout.split())


IMPORTED = """
import sys
from mlx_specprefill_server.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


HEAVY = {"mlx_lm", "transformers", "fastapi"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--help", "recommend"),
        ("--version", "0."),
        ("sevre", "'serve'"),
        ("serve --help", "--keep-pct"),
        ("serve --prot 1", "--port"),
    ],
)
def test_what_needs_no_model_imports_no_library_of_models(arguments: str, said: str) -> None:
    assert not (HEAVY | {"mlx.core", "huggingface_hub", "numpy"}) & imported(arguments, said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("serve --pair nonsense", "no pair 'nonsense'"),
        ("serve --pair demo --target x", "exclude each other"),
        ("serve --pair demo --host 999.0.0.1", "error: --host 999.0.0.1: "),
        ("eval --pair demo --task nonsense", "no task 'nonsense'"),
    ],
)
def test_a_refusal_comes_before_the_imports(arguments: str, said: str) -> None:
    assert not HEAVY & imported(arguments, said)


def imported(arguments: str, said: str) -> set[str]:
    """Return what a command has imported that says these words."""
    done = subprocess.run([sys.executable, "-c", IMPORTED, *arguments.split()], capture_output=True, text=True)
    *_, modules = done.stderr.splitlines()
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return set(modules.split())


def test_an_interruption_of_the_first_imports_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupt)
    with pytest.raises(SystemExit) as ended:
        console_main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "Aborted!\n"


def test_the_table_of_commands_has_what_they_say_of_themselves() -> None:
    group: Any = typer.main.get_command(cli.app)
    for name, (*_, text) in cli.COMMANDS.items():
        assert group.commands[name].help, f"{name} has no help"
        assert len(text) <= 66, f"{name}'s line does not fit 80 columns"


def test_every_option_of_serve_is_in_one_group() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    options = {parameter.name for parameter in serve_command().params} - {"context"}
    assert set(grouped) == options, "every option of serve needs a group in cli/grouped.py"


def test_the_help_of_serve_begins_with_examples_and_ends_with_what_few_need(text: str) -> None:
    order = [
        "Examples:",
        "Models:",
        "Address and access:",
        "Memory:",
        "Advanced: models:",
        "Settings without an option:",
    ]
    assert sorted(order, key=text.index) == order
    assert text.partition("Examples:")[2].partition("Models:")[0].count("mlx-specprefill serve") == 3
    assert "pairs.toml" not in text


def test_every_setting_is_there_with_its_variable(text: str) -> None:
    named = set(re.findall(r"MLX_SPECPREFILL_(\w+)", text))
    assert named == {name.upper() for name in Settings.model_fields}


def test_options_have_their_defaults_once(text: str) -> None:
    assert "Port to listen on; 0: any free port. Default 8000. [MLX_SPECPREFILL_PORT]" in text
    assert "Prefill long prompts sparsely. Off: only on request. Default on. [MLX_SPECPREFILL_SPECPREFILL]" in text
    assert "as SpecPrefill was published. Default default. [MLX_SPECPREFILL_RULE]" in text
    assert not re.search(r"Default[^\[]*Default", text.partition("Sparse prefill:")[2].partition("Other:")[0])


def test_there_are_few_of_them() -> None:
    assert len(serve_command().params) <= 37
    assert len(Settings.model_fields) <= 43


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_and_understood_by_the_shell(shell: str) -> None:
    environment = {"_MLX_SPECPREFILL_COMPLETE": f"source_{shell}"}
    done = CliRunner(env=environment).invoke(cli.app, [], prog_name="mlx-specprefill")
    assert done.exit_code == 0, done.output
    assert "_MLX_SPECPREFILL_COMPLETE" in done.stdout
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n"], input=done.stdout, text=True, check=True)


def test_bash_completes_commands_and_options() -> None:
    def completed(words: str, index: int) -> list[str]:
        environment = {"_MLX_SPECPREFILL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(index)}
        return CliRunner(env=environment).invoke(cli.app, [], prog_name="mlx-specprefill").stdout.split()

    assert completed("mlx-specprefill conn", 1) == ["connect"]
    assert completed("mlx-specprefill serve --api", 2) == ["--api-key"]
    assert completed("mlx-specprefill serve --rule pa", 3) == ["paper"]
