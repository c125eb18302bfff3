"""`mlx-specprefill list` and `recommend`: models on this machine, and pairs that fit its memory, by predicted times."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from huggingface_hub import constants, scan_cache_dir

from mlx_specprefill import ForwardCost, LoadError, find_model, repacked_files

from ..pairs import NAMED_PAIRS, PackagedFile, models_file, pair_state, read_pairs, size
from ..settings import Settings
from .common import OptionError, one_line_errors, usable_memory
from .options import PairsFile

TABLE = Path(__file__).parents[1] / "recommended.toml"
KEPT = 0.2  # of the prompt, as `serve` keeps where nothing else is said
STEP = 2048  # tokens of a forward, on a GPU
KEPT_BY_OWN, KEPT_BY_MAPPED = ".94", ".89"  # of an answer's tokens; docs/results.md, "A draft with another tokenizer"


def list_models(pairs_file: PairsFile = None) -> None:
    """Show the models in Hugging Face's cache, the named pairs and those of your models.toml; weights that are kept."""
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
    cache = Path(constants.HF_HUB_CACHE)
    cached = scan_cache_dir(cache).repos if cache.is_dir() else ()
    for model in sorted(cached, key=lambda model: model.repo_id):
        if model.repo_type == "model":
            state = _state(model.repo_id)
            next_step = f"mlx-specprefill {'serve --target' if state == 'ready' else 'pull'} {model.repo_id}"
            yield model.repo_id, size(model.size_on_disk), state, next_step


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
    memory_limit: Annotated[
        str | None,
        typer.Option(help="Memory for weights and caches, like 48GB. Default: the recommendation of this machine."),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of prompt and answer that must fit.")] = 32768,
) -> None:
    """Show the pairs that fit the memory of this machine, the largest target first, each with the command that comes
    next.

    Of a target's pairs the one whose first token comes soonest stands first. WAIT compares all pairs: how many times as
    long the first token of a prompt of that length takes as with the fastest. SOONER is how many times sooner it comes
    than from full reading. Both are predicted, with a fifth of the prompt kept. A pair without a draft is counted in
    full: the first start finds how many of its layers score. KEEPS is the share of an answer's tokens that a draft
    keeps, measured on two small pairs: with the target's tokenizer, or with another one. Memory is that of weights and
    KV cache; a prefill's working memory comes on top. This project ran none of these pairs: `mlx-specprefill bench`
    measures them.
    """
    with one_line_errors():
        limit = usable_memory(memory_limit)
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
    _print([("MEMORY", "WAIT", "SOONER", "KEEPS", "NEXT"), *(_row(pair, context, least) for pair in fitting)])


def _row(pair: Mapping[str, Any], tokens: int, least: float) -> tuple[str, ...]:
    here = all(find_model(pair[role]) for role in ("target", "draft") if role in pair)
    command = f"mlx-specprefill {'serve --target' if here else 'pull'} {pair['target']}"
    wait = _wait(pair, tokens)
    figures = size(_memory(pair, tokens)), f"{wait / least:.1f}"
    if "draft" not in pair:
        return *figures, "-", "-", command
    kept = KEPT_BY_MAPPED if pair.get("mapped") else KEPT_BY_OWN
    return *figures, f"{_full_wait(pair, tokens) / wait:.1f}", kept, f"{command} --draft {pair['draft']}"


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
