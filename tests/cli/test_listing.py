"""`mlx-specprefill list` and `recommend`, on a cache that is made here."""

from __future__ import annotations

import math
import re
import tomllib
from argparse import Namespace
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from benchmarks.harness import shapes
from huggingface_hub import constants
from mlx_lm.models.switch_layers import SwitchLinear
from typer.testing import CliRunner, Result

from mlx_specprefill import ForwardCost, blueprint
from mlx_specprefill.config import DraftWindow
from mlx_specprefill.engine.reading.costs import prior_cost
from mlx_specprefill_server import cli
from mlx_specprefill_server.cli.listing import LEGEND, TABLE
from tests.support.tiny import save_checkpoint

PAIRS = """
[a.target]
package = "no-such-package==1.2"
file = "no_such_package/weights.gguf"
sha256 = "%s"
[b]
target = "org/target"
draft = "self"
note = "never run here"
[c]
target = "org/elsewhere"
""" % ("0" * 64)
SHAPE_OF = {
    "mlx-community/Qwen3.5-122B-A10B-4bit": ("qwen3.5-122b-a10b", "target", 4.5, 4.5),
    "mlx-community/Qwen3.5-2B-4bit": ("qwen3.5-122b-a10b", "draft", 4.5, 4.5),
    "mlx-community/NVIDIA-Nemotron-3-Super-120B-A12B-4bit": ("nemotron-h-120b", "target", 4.5, 4.5),
    "mlx-community/NVIDIA-Nemotron-3-Nano-4B-4bit": ("nemotron-h-120b", "draft", 4.5, 4.5),
    "mlx-community/gpt-oss-120b-MXFP4-Q8": ("gpt-oss-120b", "target", 8.5, 4.25),
    "mlx-community/gpt-oss-20b-MXFP4-Q8": ("gpt-oss-120b", "draft", 8.5, 4.25),
    "mlx-community/Qwen3.5-35B-A3B-8bit": ("qwen3.5-35b-a3b", "target", 8.5, 8.5),
    "mlx-community/Qwen3.5-35B-A3B-4bit": ("qwen3.5-35b-a3b", "target", 4.5, 4.5),
    "mlx-community/Qwen3-32B-4bit": ("qwen3-32b", "target", 4.5, 4.5),
    "mlx-community/Qwen3-0.6B-4bit": ("qwen3-32b", "draft", 4.5, 4.5),
    "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit": ("llama-3.1-8b", "target", 4.5, 4.5),
    "mlx-community/Llama-3.2-1B-Instruct-4bit": ("llama-3.1-8b", "draft", 4.5, 4.5),
}
"""id -> shape, its model, bits of a weight, bits of an expert's weight; with the scales."""
MADE_FOR = {"mlx-community/Qwen3-32B-4bit": 40960, "mlx-community/Qwen3-0.6B-4bit": 40960}
"""id -> tokens of its config.json, where its shape has those that YaRN gives."""
MODELS = Path(__file__).parents[2] / "docs" / "guides" / "models.md"
ROWS: list[dict[str, Any]] = tomllib.loads(TABLE.read_text())["pair"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def store(cache: Path, name: str) -> Path:
    """Put a model into the cache; the folder of its commit."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs" / "main").write_text("c" * 40)
    return save_checkpoint(folder / "snapshots" / ("c" * 40), "llama", 1)


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "40"}).invoke(cli.app, list(arguments))


def table(*arguments: str) -> list[list[str]]:
    """The rows that a command prints; columns are apart by two blanks or more."""
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in done.stdout.splitlines()]


def recommended(*options: str) -> list[list[str]]:
    """The rows above the legend."""
    rows = table("recommend", *options)
    return rows[: rows.index([])] if [] in rows else rows


class TestList:
    def test_models_have_their_size_and_whether_they_are_whole(self, cache: Path) -> None:
        whole = store(cache, "org/whole")
        (store(cache, "org/part") / "model.safetensors").unlink()
        packed = store(cache, "org/packed")
        (packed / "config.json").unlink()
        for name in ("a", "b"):
            (packed / f"{name}.gguf").touch()
        save_checkpoint(cache.parent / ".lmstudio" / "models" / "pub" / "lisher", "llama", 1)
        rows = {row[0]: row[1:] for row in table("list") if row}
        assert rows["pub/lisher"][1:] == ["ready", "mlx-specprefill serve --target pub/lisher"]
        size = sum(path.stat().st_size for path in whole.iterdir())
        assert rows["org/whole"] == [f"{size / 2**20:.1f} MB", "ready", "mlx-specprefill serve --target org/whole"]
        assert rows["org/part"][2] == "mlx-specprefill pull org/part"
        assert rows["org/part"][1] == "not whole, or no model"
        assert "name one of them after the id, as in ID/FILE.gguf: a.gguf, b.gguf" in rows["org/packed"][1]

    def test_an_empty_cache_says_what_comes_next(self, cache: Path) -> None:
        for _ in range(2):  # the folder is missing, then empty
            first, *rest = run("list").stdout.splitlines()
            assert first.startswith(f"No model of your own is in {cache} yet: `mlx-specprefill recommend`")
            assert any(line.startswith("PAIR ") for line in rest)
            cache.mkdir(exist_ok=True)

    def test_pairs_have_their_models_and_whether_they_are_here(self, cache: Path, tmp_path: Path) -> None:
        store(cache, "org/target")
        (tmp_path / "pairs.toml").write_text(PAIRS)
        file = str(tmp_path / "pairs.toml")
        command, given = "mlx-specprefill", f"--pairs-file {file}"
        assert table("list", "--pairs-file", file)[-3:] == [
            ["a", "no-such-package==1.2", "self", "not installed", f"{command} pull a {given}"],
            ["b", "org/target", "self", "ready", f"{command} serve --pair b {given}", "never run here"],
            ["c", "org/elsewhere", "self", "from its repository", f"{command} pull c {given}"],
        ]

    def test_pairs_of_the_users_table_come_after_the_named_ones(self, cache: Path, tmp_path: Path) -> None:
        named = table("list")
        own = tmp_path / ".config" / "mlx-specprefill" / "models.toml"
        own.parent.mkdir(parents=True)
        own.write_text(PAIRS)
        both = table("list")
        assert both[: len(named)] == named
        assert [row[0] for row in both[len(named) :]] == ["a", "b", "c"]

    def test_a_pair_whose_repository_has_several_files_says_so(self, cache: Path, tmp_path: Path) -> None:
        packed = store(cache, "org/target")
        (packed / "config.json").unlink()
        for name in ("a", "b"):
            (packed / f"{name}.gguf").touch()
        (tmp_path / "pairs.toml").write_text(PAIRS)
        [row] = [row for row in table("list", "--pairs-file", str(tmp_path / "pairs.toml")) if row[:1] == ["b"]]
        assert "several GGUF files" in row[3]

    def test_without_a_cache_there_are_pairs(self, cache: Path) -> None:
        assert "demo" in [row[0] for row in table("list") if row]


class TestRecommend:
    def test_what_fits_is_shown_with_the_command_that_comes_next(self, cache: Path) -> None:
        """4.86 GB of weights and 163 840 bytes per token; lines are whole on any terminal."""
        assert recommended("--memory-limit", "11GB", "--context", "8192") == [
            ["MEMORY", "WAIT", "SOONER", "NEXT"],
            [
                "6.1 GB",
                "1.0",
                "3.1",
                "mlx-specprefill pull mlx-community/Meta-Llama-3.1-8B-Instruct-4bit "
                "--draft mlx-community/Llama-3.2-1B-Instruct-4bit",
            ],
        ]
        assert len(recommended("--memory-limit", "400GB")) == 1 + len(ROWS)

    def test_a_longer_context_takes_more(self, cache: Path) -> None:
        short, long = (recommended("--memory-limit", "11GB", "--context", str(n)) for n in (8192, 65536))
        assert len(short) == 2
        assert long == [["No pair of the table fits 11.0 GB at 65,536 tokens; smollm2 fits every machine."]]

    def test_beyond_a_models_context_it_is_left_out(self, cache: Path) -> None:
        shown = run("recommend", "--memory-limit", "400GB", "--context", "200000").stdout
        assert "Qwen3.5-122B" in shown
        assert "gpt-oss" not in shown

    @pytest.mark.parametrize("tokens", [2048, 32768, 131072])
    def test_the_largest_target_comes_first_and_its_soonest_pair(self, cache: Path, tokens: int) -> None:
        """By the forwards of both models, one after another; without a draft, by those of a full prefill."""
        waits, targets = {}, [row["target"] for row in ROWS]
        for row in ROWS:
            models = [row["target"].rpartition("/")[2]]
            forwards = [(row["target_cost"], tokens)]
            if "draft" in row:
                models.append(row["draft"].rpartition("/")[2])
                forwards = [(row["target_cost"], round(tokens / 5)), (row["draft_cost"], tokens)]
            waits[", ".join(models)] = sum(time_of(*forward) for forward in forwards)
        shown = recommended("--memory-limit", "400GB", "--context", str(tokens))[1:]
        named = [", ".join(re.findall(r"mlx-community/(\S+)", row[-1])) for row in shown]
        places = {name: (targets.index(row["target"]), waits[name]) for name, row in zip(waits, ROWS, strict=True)}
        fitting = [name for name, row in zip(waits, ROWS, strict=True) if tokens <= row["context"]]
        assert named == sorted(fitting, key=places.__getitem__)
        least = min(waits[name] for name in named)
        assert [row[1] for row in shown] == [f"{waits[name] / least:.1f}" for name in named]

    def test_the_table_has_the_largest_targets_first(self) -> None:
        """By what they hold of a gigabyte, without drafts."""
        alone = [round(stored_bytes(name) / 2**30) for name in dict.fromkeys(row["target"] for row in ROWS)]
        assert alone == sorted(alone, reverse=True)

    @pytest.mark.parametrize(("column", "tokens"), [(1, "8192"), (2, "32768"), (3, "65536")])
    def test_the_page_of_models_has_the_same_predictions(self, cache: Path, column: int, tokens: str) -> None:
        """Every pair with a draft has a row, in the same order as for the middle length, and no other."""
        rows = re.findall(
            r"^\| (\S+, \S+) \| (.+) \| (.+) \| (.+) \| (.+) \|$", MODELS.read_text(encoding="utf-8"), re.MULTILINE
        )
        page = {row[0]: row[column] for row in rows if row[column] != "-"}
        shown = recommended("--memory-limit", "400GB", "--context", tokens)[1:]
        pairs = {", ".join(re.findall(r"mlx-community/(\S+)", row[-1])): row[2] for row in shown}
        assert page == {pair: gain for pair, gain in pairs.items() if gain != "-"}
        assert all((", " in pair) == (gain != "-") for pair, gain in pairs.items())
        if column == 2:
            assert list(page) == [pair for pair in pairs if ", " in pair]

    def test_the_table_for_macs_has_the_same_figures(self, cache: Path) -> None:
        """For nine tenths of what macOS leaves a GPU: two thirds of up to 32 GB, three quarters of more."""
        page = MODELS.read_text(encoding="utf-8")
        rows = re.findall(r"^\| (\d+) GB \| (.+) \| (.+) \| (\d+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
        assert [int(memory) for memory in dict.fromkeys(row[0] for row in rows)] == [16, 32, 64, 96, 128]
        for memory, limit, pair, tokens, takes, sooner in rows:
            assert limit == f"{0.9 * int(memory) * (2 / 3 if int(memory) <= 32 else 3 / 4):.1f} GB"
            shown = table("recommend", "--memory-limit", limit.replace(" ", ""), "--context", tokens)
            found = {", ".join(re.findall(r"mlx-community/(\S+)", row[-1])): row for row in shown if len(row) > 3}
            assert (found[pair][0], found[pair][2]) == (takes, sooner)

    def test_a_machine_is_more_than_what_it_gives_to_models(self, cache: Path) -> None:
        assert recommended("--machine", "64GB") == recommended("--memory-limit", f"{0.9 * 0.75 * 64}GB")
        assert recommended("--machine", "16GB") == recommended("--memory-limit", f"{0.9 * 2 / 3 * 16}GB")
        assert run("recommend", "--machine", "64GB", "--memory-limit", "9GB").exit_code == 2

    def test_every_column_is_explained_below_them(self, cache: Path) -> None:
        columns, *rest = table("recommend", "--memory-limit", "400GB")
        assert [row[0] for row in rest[rest.index([]) + 2 :][:-1]] == columns == [name for name, _ in LEGEND]

    def test_what_is_here_is_served(self, cache: Path) -> None:
        store(cache, "mlx-community/gpt-oss-20b-MXFP4-Q8")
        store(cache, "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit")  # without its draft
        commands = sorted(row[-1] for row in recommended("--memory-limit", "13GB")[1:])
        assert commands[1] == "mlx-specprefill serve --target mlx-community/gpt-oss-20b-MXFP4-Q8"
        assert commands[0].startswith("mlx-specprefill pull mlx-community/Meta-Llama")

    def test_this_machine_is_asked_without_a_limit(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLX_SPECPREFILL_MEMORY_LIMIT", "1GB")
        assert "No pair of the table fits 1.0 GB" in run("recommend").stdout
        refused = run("recommend", "--memory-limit", "much")
        assert refused.exit_code == 2
        assert "a size such as 512MB or 2GB is expected" in refused.stderr


def time_of(cost: list[float], tokens: int) -> float:
    """Milliseconds of a prompt in forwards of 2048 tokens, the last of which has 32 or a few more."""
    fixed, token, pair = cost
    forwards = 1 + math.ceil((tokens - 32) / 2048)
    return fixed * (forwards - 1) + fixed + token * tokens + pair * tokens**2 / 2


def parameters(model: nn.Module) -> int:
    return sum(int(array.size) for _, array in nn.utils.tree_flatten(model.parameters()))


def stored_bytes(name: str) -> float:
    """Weights of a model, and what its cache holds of any sequence."""
    *_, bits, expert_bits = SHAPE_OF[name]
    model = shapes.random_model(config_of(name))
    experts = sum(parameters(module) for _, module in model.named_modules() if isinstance(module, SwitchLinear))
    weights = ((parameters(model) - experts) * bits + experts * expert_bits) / 8
    return weights + (blueprint(config_of(name)).cache_bytes(0) or 0)


def config_of(name: str) -> dict[str, Any]:
    shape, role, *_ = SHAPE_OF[name]
    whole = Namespace(shape=shape, draft_of=None, layers=None, draft_layers=None, narrow=1, experts=None)
    return shapes.config_of(whole, role)


@pytest.mark.extended
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['target']}+{row.get('draft', 'self')}".replace("/", "-"))
def test_figures_are_those_of_the_layers(row: dict[str, Any]) -> None:
    draft = [row["draft"]] if "draft" in row else []
    models = [row["target"], *draft]
    designs = [blueprint(config_of(name)) for name in models]
    assert math.isclose(row["fixed_gb"], sum(map(stored_bytes, models)) / 2**30, abs_tol=0.005)
    assert row["bytes_per_token"] == sum(design.footprint.per_token for design in designs if design.footprint)
    contexts = [MADE_FOR.get(name, design.context) for name, design in zip(models, designs, strict=True)]
    assert row["context"] == min(contexts)
    assert row["source"]


@pytest.mark.extended
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['target']}+{row.get('draft', 'self')}".replace("/", "-"))
def test_costs_are_those_that_the_engine_assumes(row: dict[str, Any]) -> None:
    """In the same unit for both; which one differs between devices."""
    unit = (
        prior_cost(shapes.random_model(config_of(row["target"])), config_of(row["target"])).token
        / row["target_cost"][1]
    )
    for role in ("target", "draft")[: 1 + ("draft" in row)]:
        window = DraftWindow() if role == "draft" else None
        assumed = prior_cost(shapes.random_model(config_of(row[role])), config_of(row[role]), window)
        noted = ForwardCost(*row[f"{role}_cost"]).scale(unit)
        assert (noted.fixed, noted.token, noted.pair) == pytest.approx(
            (assumed.fixed, assumed.token, assumed.pair), rel=1e-4
        )
