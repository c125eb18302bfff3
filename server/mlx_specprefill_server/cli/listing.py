"""`mlx-specprefill list` and `recommend`: models on this machine, and pairs that fit its memory, by predicted times."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from huggingface_hub import constants

from mlx_specprefill import ForwardCost, LoadError, find_model, mac_limit, repacked_files, stored_models

from ..pairs import NAMED_PAIRS, PackagedFile, models_file, pair_state, read_pairs, size
from ..settings.server import Settings
from .common import OptionError, one_line_errors, usable_memory
from .options import PairsFile

TABLE = Path(__file__).parents[1] / "recommended.toml"
KEPT = 0.2  # of the prompt, as `serve` keeps where nothing else is said
STEP = 2048  # tokens of a forward, on a GPU
LEGEND = (
    ("MEMORY", "weights and KV cache of such a prompt; a prefill's working memory comes on top"),
    ("WAIT", "how many times as long its first token takes as with the fastest of these pairs, predicted"),
    ("SOONER", "how many times sooner it comes than from full reading by the same target, predicted; -: no draft"),
    ("NEXT", "the command that fetches or serves it"),
)


def list_models(pairs_file: PairsFile = None) -> None:
    """Show the models that Hugging Face's tools and LM Studio left here, the pairs, and weights that are kept."""
    with one_line_errors():
        models, pairs, repacked = list(_models()), list(_pairs(pairs_file)), list(_repacked())
    if models:
        _print([("MODEL", "SIZE", "STATE", "NEXT"), *models])
    else:
        typer.echo(f"No model of your own is in {constants.HF_HUB_CACHE} yet: `mlx-specprefill recommend` names some.")
    typer.echo()
    _print([("PAIR", "TARGET", "DRAFT", "STATE", "NEXT", "NOTE"), *pairs])
    if repacked:
        typer.echo()
        _print([("REPACKED WEIGHTS OF", "SIZE", "TO REMOVE THEM"), *repacked])


def _models() -> Iterator[tuple[str, ...]]:
    for name, folder in stored_models():
        state, files = _state(name), [path for path in folder.rglob("*") if path.is_file()]
        next_step = f"mlx-specprefill {'serve --target' if state == 'ready' else 'pull'} {name}"
        yield name, size(sum(path.stat().st_size for path in files)), state, next_step


def _state(repository: str) -> str:
    try:
        return "not whole, or no model" if find_model(repository) is None else "ready"
    except LoadError as error:
        return str(error)


def _pairs(pairs_file: Path | None) -> Iterator[tuple[str, ...]]:
    own = models_file() if models_file().is_file() else None
    for file in (pairs_file,) if pairs_file is not None or own is None else (None, own):
        for name, row in read_pairs(file or NAMED_PAIRS).items():
            models = (row.target, row.draft or "self")
            shown = [model.package if isinstance(model, PackagedFile) else model for model in models]
            state = pair_state(name, row, file)
            of_file = "" if file is None else f" --pairs-file {file}"
            command = {"ready": f"serve --pair {name}", "only in a clone": ""}.get(state, f"pull {name}")
            yield name, *shown, state, f"mlx-specprefill {command}{of_file}" if command else "", row.note


def _repacked() -> Iterator[tuple[str, ...]]:
    folder = Settings().beside_costs("repacked")
    for file, source in () if folder is None else repacked_files(folder):
        yield source, size(file.stat().st_size), shlex.join(("rm", str(file)))


def recommend(
    machine: Annotated[str | None, typer.Option(help="Memory of a Mac, like 64GB. Default: this machine.")] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(help="Memory for weights and caches, like 48GB. Default: the recommendation of this machine."),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of prompt and answer that must fit.")] = 32768,
) -> None:
    """Show the pairs that fit the memory of a machine, the largest target first, and what the columns mean.

    Of a target's pairs the one whose first token comes soonest stands first. A pair without a draft is counted in full:
    the first start finds how many of its layers score.
    """
    with one_line_errors():
        if machine is not None and memory_limit is not None:
            raise OptionError("--machine and --memory-limit exclude each other: the limit is a part of the machine")
        limit = usable_memory(memory_limit or machine)
        if machine is not None and limit is not None:
            limit = mac_limit(limit)
        if limit is None:
            raise OptionError("this machine doesn't say how much memory may be used: set --memory-limit")
    pairs = tomllib.loads(TABLE.read_text(encoding="utf-8"))["pair"]
    fitting = [pair for pair in pairs if _memory(pair, context) <= limit and context <= pair["context"]]
    if not fitting:
        _print([(f"No pair of the table fits {size(limit)} at {context:,} tokens; smollm2 fits every machine.",)])
        return
    targets = [pair["target"] for pair in pairs]  # the largest first
    fitting.sort(key=lambda pair: (targets.index(pair["target"]), _wait(pair, context)))
    least = min(_wait(pair, context) for pair in fitting)
    _print([("MEMORY", "WAIT", "SOONER", "NEXT"), *(_row(pair, context, least) for pair in fitting)])
    typer.echo(f"\nWhat fits {size(limit)}, for {context:,} tokens of prompt and answer, of which a fifth is kept:")
    _print(LEGEND)
    typer.echo("This project ran none of these pairs: `mlx-specprefill bench` measures them.")


def _row(pair: Mapping[str, Any], tokens: int, least: float) -> tuple[str, ...]:
    here = all(find_model(pair[role]) for role in ("target", "draft") if role in pair)
    command = f"mlx-specprefill {'serve --target' if here else 'pull'} {pair['target']}"
    wait = _wait(pair, tokens)
    figures = size(_memory(pair, tokens)), f"{wait / least:.1f}"
    if "draft" not in pair:
        return *figures, "-", command
    return *figures, f"{_full_wait(pair, tokens) / wait:.1f}", f"{command} --draft {pair['draft']}"


def _memory(pair: Mapping[str, Any], tokens: int) -> int:
    """Return the bytes of weights and caches."""
    return int(round(pair["fixed_gb"] * 2**30) + pair["bytes_per_token"] * tokens)


def _wait(pair: Mapping[str, Any], tokens: int) -> float:
    """Return the time until the first token of such a prompt, as the engine predicts it, in milliseconds of the
    table's processor.
    """
    if "draft" not in pair:
        return _full_wait(pair, tokens)
    target, draft = ForwardCost(*pair["target_cost"]), ForwardCost(*pair["draft_cost"])
    return draft.prefill_ms(tokens, 0, STEP) + target.prefill_ms(round(KEPT * tokens), 0, STEP)


def _full_wait(pair: Mapping[str, Any], tokens: int) -> float:
    return ForwardCost(*pair["target_cost"]).prefill_ms(tokens, 0, STEP)


def _print(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
