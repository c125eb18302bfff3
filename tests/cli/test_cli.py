"""The command line over small real models: what it prints, and how it refuses."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mlx_specprefill import __version__
from mlx_specprefill._blas import BlasStatus
from mlx_specprefill_server import cli
from mlx_specprefill_server.cli import common
from mlx_specprefill_server.cli.options import PairOptions
from mlx_specprefill_server.cli.serve import refusals, run_server
from mlx_specprefill_server.http.sockets import bound_sockets
from mlx_specprefill_server.models.pool import Models
from mlx_specprefill_server.models.service import Service
from mlx_specprefill_server.pairs import MissingPairError, Pair
from tests.support import tiny

PROMPT = "w" + " w".join(str(n) for n in tiny.random_prompt(400))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name a loadable pair, whose draft is calibrated."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny.save_checkpoint(folder / "target", "llama", seed=1)
    draft = tiny.save_checkpoint(folder / "draft", "llama", seed=2)
    heads = {"heads": [[1, 0, 0.5]], "depth": 2, "layers": 3, "recall": {"copy": 1.0}}
    (draft / "heads.json").write_text(json.dumps(heads))
    return ["--target", str(target), "--draft", str(draft)]


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT)
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(cli.app, list(arguments))


def test_the_version() -> None:
    assert run("--version").stdout == f"mlx-specprefill {__version__}\n"


class TestInspect:
    def test_kept_chunks_with_scores_and_flags(self, models: list[str], prompt_file: str) -> None:
        done = run("inspect", "--raw", "--prompt-file", prompt_file, *models)
        assert done.exit_code == 0, done.output
        assert " 0-" in done.stdout
        assert "forced" in done.stdout
        assert "dropped" not in done.stdout
        assert "of 400 tokens kept" in done.stdout

    def test_standard_input_and_a_share_to_keep(self, models: list[str]) -> None:
        kept = []
        for share in ("0.2", "0.5"):
            arguments = ["inspect", "--raw", "--prompt-file", "-", "--keep-pct", share, *models]
            done = CliRunner().invoke(cli.app, arguments, input=PROMPT)
            found = re.search(r"(\d+) of 400 tokens kept", done.stdout)
            assert found is not None, done.output
            kept.append(int(found[1]))
        assert kept[1] - kept[0] >= 100  # 15 of 50 chunks, less what is kept anyway

    def test_heads_that_are_not_there(self, models: list[str], prompt_file: str, tmp_path: Path) -> None:
        pairs = tmp_path / "pairs.toml"
        pairs.write_text(f'[a]\ntarget = "{models[1]}"\ndraft = "self"\ndraft_heads = "no/such.safetensors"\n')
        wrong = run("inspect", "--raw", "--prompt-file", prompt_file, "--pairs-file", str(pairs), "--pair", "a")
        assert (wrong.exit_code, wrong.stderr.count("error: no/such.safetensors: ")) == (2, 1)

    def test_all_lists_the_dropped_ones_too(self, models: list[str], prompt_file: str) -> None:
        done = run("inspect", "--raw", "--prompt-file", prompt_file, "--all", "--keep-pct", "0.1", *models)
        assert "dropped" in done.stdout
        rows = [[cell.strip() for cell in line.split("│")] for line in done.stdout.splitlines() if "e-0" in line]
        assert all(before[4] != after[4] for before, after in pairwise(rows))
        assert sum(int(row[1]) for row in rows) == 50  # chunks of 8


def served_alone(models: Models) -> Service:
    """Return the service of the one model that a server has."""
    service = models.default.service
    assert service is not None
    return service


class TestServe:
    @pytest.fixture
    def served(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Models]:
        """Return the list of served models, with a home that has no table."""
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        calls: list[Models] = []
        monkeypatch.setattr(run_server, "serve_models", lambda models, _: calls.append(models))
        return calls

    def test_options_become_settings(self, models: list[str], served: list[Models]) -> None:
        options = ["--port", "0", "--api-key", "a", "--api-key", "b", "--model-alias", "mine"]
        policy = ["--no-specprefill", "--specprefill-threshold", "99", "--keep-pct", "0.3"]
        done = run("serve", *options, *policy, "--kv-bits", "8", *models)
        assert done.exit_code == 0, done.output
        service = served_alone(served[0])
        settings, config = service.settings, service.engine.config
        assert settings.port == 0
        assert [key.get_secret_value() for key in settings.api_keys] == ["a", "b"]
        assert settings.model_alias == "mine"
        assert config.kv_bits == 8
        assert (config.policy.enabled, config.policy.threshold) == (False, 99)
        assert str(config.policy.keep_pct) == "3/10"

    def test_the_port_is_bound_once_before_the_imports(
        self, models: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        bound: list[list[socket.socket]] = []
        served: list[list[socket.socket]] = []

        @contextmanager
        def bind(host: str, port: int) -> Iterator[list[socket.socket]]:
            with bound_sockets(host, port) as sockets:
                bound.append(sockets)
                yield sockets

        def serve(_: Models, sockets: list[socket.socket]) -> None:
            assert all(listener.fileno() >= 0 for listener in sockets)
            served.append(sockets)

        monkeypatch.setattr(run_server, "serve_models", serve)
        for module in (refusals, run_server):
            monkeypatch.setattr(module, "bound_sockets", bind)
        table = tmp_path / "models.toml"
        table.write_text('[a]\ntarget = "x/y"\n')
        for options in (models, ["--config", str(table)]):
            assert run("serve", "--port", "0", *options).exit_code == 0
        assert served == bound
        assert all(listener.fileno() < 0 for sockets in bound for listener in sockets)

    def test_a_table_of_models(self, served: list[Models], tmp_path: Path) -> None:
        table = tmp_path / "models.toml"
        table.write_text(
            '[a]\ntarget = "x/y"\n["b-1"]\ntarget = "./z"\nalias = "b"\naliases = ["c"]\npin = true\nttl = 60\n'
        )
        done = run("serve", "--config", str(table), "--max-models", "1", "--port", "0", "--rule", "paper")
        assert done.exit_code == 0, done.output
        [models] = served
        assert [(e.id, e.name, e.aliases, e.pin, e.ttl) for e in models] == [
            ("a", "a", (), False, None),
            ("b", "b-1", ("c",), True, 60.0),
        ]
        assert [e.settings.rule for e in models] == ["paper", "paper"]
        assert models.several
        assert models.state.settings.max_models == 1

    def test_the_users_own_table_is_taken_where_no_model_is_named(
        self, served: list[Models], models: list[str], tmp_path: Path
    ) -> None:
        table = tmp_path / "config" / "mlx-specprefill" / "models.toml"
        table.parent.mkdir(parents=True)
        table.write_text('[mine]\ntarget = "x/y"\n')
        assert run("serve", "--port", "0").exit_code == 0
        assert [entry.id for entry in served[0]] == ["mine"]
        assert run("serve", *models).exit_code == 0
        assert [models.several for models in served] == [True, False]

    @pytest.mark.parametrize(
        ("text", "options", "said"),
        [
            ('[a]\ntarget = "x/y"\n', ["--pair", "demo"], "--config and --pair exclude each other"),
            ("", [], "names no model"),
            ('[a]\ntarget = "x/y"\n[b]\ntarget = "x/y"\naliases = ["a"]\n', [], "[a] and [b] are both called 'a'"),
            ('[a]\ntarget = "x/y"\nttl = 0\n', [], "a.ttl: Input should be greater than 0"),
        ],
    )
    def test_tables_with_mistakes(
        self, served: list[Models], tmp_path: Path, text: str, options: list[str], said: str
    ) -> None:
        table = tmp_path / "models.toml"
        table.write_text(text)
        done = run("serve", "--config", str(table), "--port", "0", *options)
        assert done.exit_code == 2
        assert said in done.stderr
        assert not served

    def test_memory_options(self, models: list[str], served: list[Models], tmp_path: Path) -> None:
        sizes = ["--memory-limit", "2GB", "--prefix-cache-size", "64MB", "--prefix-disk-size", "1GB"]
        others = ["--prefix-cache-dir", str(tmp_path), "--densify", "off"]
        done = run("serve", *sizes, *others, *models)
        assert done.exit_code == 0, done.output
        config = served_alone(served[0]).engine.config
        assert (config.memory_limit, config.prefix_cache_bytes, config.prefix_disk_bytes) == (
            2 << 30,
            64 << 20,
            1 << 30,
        )
        assert config.prefix_cache_dir == tmp_path
        assert not config.policy.densify

    def test_the_pair_file_gives_defaults_that_options_override(
        self, models: list[str], served: list[Models], tmp_path: Path
    ) -> None:
        pairs = tmp_path / "pairs.toml"
        target, draft = models[1], models[3]
        pairs.write_text(f'[mine]\ntarget = "{target}"\ndraft = "{draft}"\nthreshold = 77\nkeep_pct = 0.4\n')
        from_file = ["serve", "--pairs-file", str(pairs), "--pair", "mine"]
        assert run(*from_file).exit_code == 0
        assert run(*from_file, "--specprefill-threshold", "5").exit_code == 0
        services = [served_alone(models) for models in served]
        assert [service.engine.config.policy.threshold for service in services] == [77, 5]
        assert [str(service.engine.config.policy.keep_pct) for service in services] == ["2/5", "2/5"]
        assert [service.settings.model_alias for service in services] == ["mine", "mine"]

    @pytest.mark.extended
    def test_the_environment_beats_the_pair_file(
        self, models: list[str], served: list[Models], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pairs = tmp_path / "pairs.toml"
        pairs.write_text(f'[mine]\ntarget = "{models[1]}"\nthreshold = 77\n')
        monkeypatch.setenv("MLX_SPECPREFILL_SPECPREFILL_THRESHOLD", "6")
        assert run("serve", "--pairs-file", str(pairs), "--pair", "mine").exit_code == 0
        assert served_alone(served[0]).engine.config.policy.threshold == 6


class TestEval:
    @pytest.mark.parametrize("arm", ["absent", "random-absent"])
    def test_one_arm_is_not_measured_under_two_names(self, arm: str) -> None:
        refused = run(*f"eval --pair demo --task needle --length 400 -n 1 --arm sparse --arm {arm}".split())
        assert refused.exit_code != 0
        assert f"arm {arm} would measure another arm again" in refused.stderr


class TestDefaultPair:
    @staticmethod
    def found(monkeypatch: pytest.MonkeyPatch, *there: str) -> None:
        def find(name: str, _: Path | None = None) -> Pair:
            if name not in there:
                raise MissingPairError(f"{name} is not here")
            return Pair(target=name)

        monkeypatch.setattr(common, "find_pair", find)

    def test_the_real_model_where_it_is_installed(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.found(monkeypatch, "smollm2", "demo")
        assert common.choose(PairOptions()).target == "smollm2"
        assert capsys.readouterr().err == ""

    def test_else_the_bundled_one_and_a_line_that_says_so(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.found(monkeypatch, "demo")
        assert common.choose(PairOptions()).target == "demo"
        note = capsys.readouterr().err
        assert note.startswith("note: smollm2 is not here. Taking demo instead")
        assert note.count("\n") == 1

    def test_an_installation_with_neither_says_how_to_get_the_real_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found(monkeypatch)
        with pytest.raises(MissingPairError, match="smollm2 is not here"):
            common.choose(PairOptions())


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["inspect", "--prompt-file", "{missing}"], "No such file"),
            (["inspect", "--prompt-file", "{prompt}", "--keep-pct", "0"], "--keep-pct must be a number in (0, 1]"),
            (["inspect", "--prompt-file", "{prompt}", "--keep-pct", "much"], "--keep-pct must be a number in (0, 1]"),
            (["serve", "--pair", "nonsense"], "no pair 'nonsense': there are: smollm2, "),
            (["serve", "--pair", "smolm2"], "no pair 'smolm2': did you mean smollm2?"),
            (["serve", "--pairs-file", "{missing}", "--pair", "mine"], "can't read"),
            (["serve", "--pairs-file", "{missing}"], "--pairs-file needs --pair"),
            (["serve", "--draft", "somewhere"], "--draft needs --target"),
            (["serve", "--target", "{missing}"], "there is no such folder or file"),
            (["serve", "--target", "{broken}"], "broken/config.json: Expecting value"),
            (["eval", "--pair", "demo", "--task", "nonsense"], "no task 'nonsense'; there are: agents, ruler, "),
            (["serve", "--pair", "demo", "--memory-limit", "plenty"], "such as 512MB or 2GB"),
            (["serve", "--pair", "demo", "--kv-bits", "7"], "kv_bits must be one of"),
            (["serve", "--pair", "demo", "--keep-pct", "1.5"], "must be a number in (0, 1]"),
        ],
    )
    def test_one_line_and_exit_code_2(self, arguments: list[str], words: str, prompt_file: str, tmp_path: Path) -> None:
        places = {name: str(tmp_path / name) for name in ("missing", "broken")} | {"prompt": prompt_file}
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "config.json").write_text('{"model_type":')
        done = run(*(argument.format(**places) for argument in arguments))
        assert done.exit_code == 2
        assert words in done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""

    def test_a_pair_that_does_not_match(self, models: list[str], prompt_file: str, tmp_path: Path) -> None:
        other = tiny.save_checkpoint(tmp_path / "other", "llama", words=90, vocab_size=90)
        done = run("inspect", "--raw", "--prompt-file", prompt_file, "--target", models[1], "--draft", str(other))
        assert done.exit_code == 2
        assert "different vocabularies" in done.stderr
        assert "Traceback" not in done.output

    def test_a_model_without_a_chat_template(self, models: list[str], prompt_file: str) -> None:
        done = run("inspect", "--prompt-file", prompt_file, *models)
        assert done.exit_code == 2
        assert "chat template" in done.stderr

    def test_a_prompt_that_is_too_long(self, models: list[str], tmp_path: Path) -> None:
        path = tmp_path / "long.txt"
        path.write_text("w5 " * 5000)
        done = run("inspect", "--raw", "--prompt-file", str(path), *models)
        assert done.exit_code == 2
        assert "maximum context length is 4096" in done.stderr

    def test_no_draft_can_not_be_inspected(self, models: list[str], prompt_file: str) -> None:
        done = run("inspect", "--raw", "--prompt-file", prompt_file, *models[:2])
        assert done.exit_code == 2
        assert "no draft model is loaded" in done.stderr


def test_the_blas_notice_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    status = BlasStatus("missing", notice="Install OpenBLAS.")
    monkeypatch.setattr(common, "BLAS", status)
    done = run("serve", "--pair", "nonsense")
    assert done.stderr.splitlines()[0] == "note: Install OpenBLAS."
    assert done.stderr.count("OpenBLAS") == 1


def test_main_is_the_console_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mlx-specprefill", "--help"])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 0
    assert {"serve", "inspect"} <= set(capsys.readouterr().out.split())
