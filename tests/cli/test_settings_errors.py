"""Wrong settings are named as the user gave them: as an option or as a variable."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner, Result

from mlx_specprefill_server import cli
from mlx_specprefill_server.settings.server import Settings, flag_of, unknown_variables, what_is_wrong


def serve(*options: str, **environment: str) -> Result:
    names = {f"MLX_SPECPREFILL_{name}": value for name, value in environment.items()}
    return CliRunner(env={"COLUMNS": "200", **names}).invoke(cli.app, ["serve", "--pair", "demo", *options])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "PORT",
            "abc",
            'MLX_SPECPREFILL_PORT: Input should be a valid integer, unable to parse string as an integer (got "abc")',
        ),
        ("PORT", "70000", 'MLX_SPECPREFILL_PORT: Input should be less than or equal to 65535 (got "70000")'),
        ("RULE", "mine", "MLX_SPECPREFILL_RULE: Input should be 'default' or 'paper' (got \"mine\")"),
        ("MEMORY_LIMIT", "much", "MLX_SPECPREFILL_MEMORY_LIMIT: a size such as 512MB or 2GB is expected, got 'much'"),
    ],
)
def test_a_variable_is_named_with_its_value(name: str, value: str, message: str) -> None:
    done = serve(**{name: value})
    assert (done.exit_code, done.stderr) == (2, f"error: {message}\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory-limit", "much"], "--memory-limit: a size such as 512MB or 2GB is expected, got 'much'"),
        (["--max-models", "0"], "--max-models: Input should be greater than or equal to 1 (got 0)"),
    ],
)
def test_an_option_is_named_as_it_is_spelled(options: list[str], message: str) -> None:
    done = serve(*options)
    assert (done.exit_code, done.stderr) == (2, f"error: {message}\n")


def test_a_key_is_never_shown() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(api_keys=({"geheim": 1},))
    assert "geheim" not in what_is_wrong(caught.value, {})
    assert "--api-key" in what_is_wrong(caught.value, {})


def test_every_setting_with_an_option_is_spelled_as_serve_spells_it() -> None:
    group: Any = typer.main.get_command(cli.app)
    spelled = {parameter.name: parameter.opts for parameter in group.commands["serve"].params}
    assert [name for name in Settings.model_fields if name in spelled and flag_of(name) not in spelled[name]] == []


def test_unknown_variables_come_with_the_nearest_name() -> None:
    given = {"MLX_SPECPREFILL_PROT": "1", "mlx_specprefill_host": "h", "MLX_SPECPREFILL_BLAS": "off", "PATH": "/"}
    (sentence,) = unknown_variables(given)
    assert sentence.endswith("MLX_SPECPREFILL_PROT is no setting; did you mean MLX_SPECPREFILL_PORT?")
    (sentence,) = unknown_variables({"MLX_SPECPREFILL_QQQQQQQQ": "1"})
    assert sentence.endswith("MLX_SPECPREFILL_QQQQQQQQ is no setting")


def test_the_command_line_warns_of_them_and_goes_on() -> None:
    done = serve(API_KEY="a", PORT="abc")
    note, error = done.stderr.splitlines()
    assert note.endswith("MLX_SPECPREFILL_API_KEY is no setting; did you mean MLX_SPECPREFILL_API_KEYS?")
    assert error.startswith("error: MLX_SPECPREFILL_PORT")
