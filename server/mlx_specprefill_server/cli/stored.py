"""`mlx-specprefill list`, `show` and `rm`: the models on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mlx_specprefill import LoadError, is_repository_id, place_of

from ..getting.describing import LENGTHS, facts
from ..getting.hub import look_up, repository_and_file
from ..getting.inventory import PLACES, Package, StoredModel, packages_of, pair_state, stored_models, support
from ..getting.needs import Need, need_of_repository, need_of_stored, size
from ..getting.removing import delete
from ..hosting.table import models_file
from ..packages import uninstall
from ..pairs import NAMED_PAIRS, Row, find_pair, read_pairs
from .common import OptionError, one_line_errors
from .options import PairsFile

__all__ = ["list_models", "rm", "show"]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
KeepPct = Annotated[float, typer.Option(min=0.01, max=1, help="Share of chunks that a sparse prefill keeps.")]


def list_models(as_json: AsJson = False, pairs_file: PairsFile = None) -> None:
    """Show what is on this machine: models in Hugging Face's cache and LM Studio's folders, packages, pairs.

    Pairs are those of --pairs-file, else the named ones and those of models.toml in your configuration folder.
    """
    with one_line_errors():
        named = _named(pairs_file)
        models = [_model_facts(model) for model in stored_models()]
        packages = [_package_facts(package) for _, rows in named for package in packages_of(rows)]
        pairs = [_pair_facts(name, row, file) for file, rows in named for name, row in rows.items()]
    if as_json:
        typer.echo(json.dumps({"models": models, "packages": packages, "pairs": pairs}))
        return
    _print("Models", ("id", "size", "where", "architecture", "sparse prefill"), (_model_cells(one) for one in models))
    _print("Packages", ("package", "pair", "where"), (_package_cells(one) for one in packages))
    _print("Pairs", ("pair", "target", "draft", "state"), (_pair_cells(one) for one in pairs))


def _named(file: Path | None) -> list[tuple[Path | None, dict[str, Row]]]:
    """The pairs of the file; without one those that come along, and those of the user's table."""
    files = [file] if file is not None else [None, *([models_file()] if models_file().is_file() else [])]
    return [(one, read_pairs(one or NAMED_PAIRS)) for one in files]


def _model_facts(model: StoredModel) -> dict[str, Any]:
    design = model.design()
    word, reason = support(design)
    return {
        "id": model.id,
        "place": model.place,
        "path": str(model.path or model.folder),
        "bytes": model.nbytes,
        "architecture": None if isinstance(design, str) else design.architecture,
        "support": word,
        "reason": reason,
    }


def _model_cells(model: dict[str, Any]) -> tuple[str, ...]:
    said = model["support"] if model["reason"] is None else f"{model['support']}: {model['reason']}"
    return model["id"], size(model["bytes"]), PLACES[model["place"]], model["architecture"] or "", said


def _package_facts(package: Package) -> dict[str, Any]:
    path = None if package.path is None else str(package.path)
    return {"package": package.file.package, "pair": package.pair, "path": path}


def _package_cells(package: dict[str, Any]) -> tuple[str, ...]:
    return package["package"], package["pair"], package["path"] or "not installed"


def _pair_facts(name: str, row: Row, file: Path | None) -> dict[str, Any]:
    state, problem = pair_state(name, row, file)
    target, draft = (_said(model) for model in (row.target, row.draft))
    return {"pair": name, "target": target, "draft": draft, "state": state, "problem": problem, "note": row.note}


def _said(model: Any) -> str | None:
    return model if model is None or isinstance(model, str) else str(model.package)


def _pair_cells(pair: dict[str, Any]) -> tuple[str, ...]:
    target, draft = (_short(pair[role]) for role in ("target", "draft"))
    return pair["pair"], target, draft or "self", pair["problem"] or pair["state"]


def _short(name: str | None) -> str:
    """A folder without the way to it."""
    return "" if name is None else Path(name).name if Path(name).is_absolute() else name


def show(
    name: Annotated[str, typer.Argument(help="A repository id, a folder, a GGUF file, or a named pair.")],
    keep_pct: KeepPct = 0.2,
    as_json: AsJson = False,
    pairs_file: PairsFile = None,
) -> None:
    """Show whether a model can be prefilled sparsely, the memory that it takes, and what each draft at hand would gain.

    Loads nothing. Of a model that is not here, the hub is asked. Gains are counted operations of a full prefill over
    those of a sparse one, for the target's own first layers ("self") with a quarter of them; calibrate measures.
    """
    with one_line_errors():
        found = _found(name, pairs_file)
        said = facts(found.need, found.path, found.stored, Fraction(str(keep_pct)), found.draft)
    if as_json:
        typer.echo(json.dumps(said))
        return
    _print_facts(said)


@dataclass(frozen=True, slots=True)
class _Found:
    need: Need
    path: Path | None
    stored: StoredModel | None
    draft: Path | None


def _found(name: str, pairs_file: Path | None) -> _Found:
    """
    Raises:
        LoadError, HubError: it is neither here nor on the hub, or can't be read.
    """
    draft = None
    if pairs_file is not None or name in read_pairs(NAMED_PAIRS):
        pair = find_pair(name, pairs_file)
        name, draft = pair.target, None if pair.draft in (None, "self") else place_of(str(pair.draft))
    path = place_of(name)
    if path is None:
        return _Found(_on_the_hub(name), None, None, draft)
    if not path.exists():
        raise LoadError(f"{name}: there is no such folder or file")
    stored = next((model for model in stored_models() if model.path == path), None)
    return _Found(need_of_stored(name, path), path, stored, draft)


def _on_the_hub(name: str) -> Need:
    if not is_repository_id(name):
        raise OptionError(f"{name!r} is neither a pair nor a repository id: those are as in publisher/name")
    repository, file = repository_and_file(name)
    return replace(need_of_repository(look_up(repository, file), file), name=name)


def _print_facts(said: dict[str, Any]) -> None:
    where = "not here: from the hub" if said["path"] is None else said["path"]
    place = f" ({PLACES[said['place']]})" if said["place"] else ""
    reason = f": {said['reason']}" if said["reason"] else ""
    rows = [
        ("model", said["id"]),
        ("where", f"{where}{place}"),
        ("on disk", "" if said["bytes"] is None else size(said["bytes"])),
        ("architecture", said["architecture"] or "unknown"),
        ("sparse prefill", f"{said['support']}{reason}"),
        ("context", "unknown" if said["context"] is None else f"{said['context']:,} tokens"),
        ("weights", size(said["weights"])),
    ]
    _print(None, None, [row for row in rows if row[1]])
    lengths = [f"{tokens // 1024}K" for tokens in LENGTHS]
    memory = [(one["id"], *_sizes(one["memory"])) for one in (said, *said["drafts"]) if one["id"] != "self"]
    _print("Memory: weights and KV cache", ("model", *lengths), memory)
    gains = [(one["id"], one["tokenizer"], *_gains(one["predicted_gain"])) for one in said["drafts"]]
    _print(f"Predicted gain with each draft at hand, keep {said['keep']:g}", ("draft", "tokenizer", *lengths), gains)


def _sizes(memory: dict[int, int | None]) -> list[str]:
    return ["-" if count is None else size(count) for count in memory.values()]


def _gains(gains: dict[int, float | None]) -> list[str]:
    return ["-" if gain is None else f"{gain:.2f}" for gain in gains.values()]


def rm(
    name: Annotated[str, typer.Argument(help="A repository id, or a pair whose model comes in a Python package.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    lm_studio: Annotated[
        bool, typer.Option("--lm-studio", help="Delete it from LM Studio's folder, which then has it no more.")
    ] = False,
    pairs_file: PairsFile = None,
) -> None:
    """Delete a model from Hugging Face's cache, or uninstall the package of a pair; asks first.

    Nothing else is ever deleted, and from LM Studio's folder only with --lm-studio.
    """
    with one_line_errors():
        rows = read_pairs(pairs_file or NAMED_PAIRS)
        if name in rows:
            _uninstall(name, rows, yes)
        else:
            _delete(name, "lm-studio" if lm_studio else "hugging-face", yes)


def _uninstall(name: str, rows: dict[str, Row], yes: bool) -> None:
    installed = [one for one in packages_of(rows) if one.pair == name and one.path is not None]
    if not installed:
        raise OptionError(f"pair {name!r} has no installed package; its models are removed by their repository ids")
    for package in installed:
        _ask(f"Uninstall the package {package.file.package}, with {package.path}?", yes)
        uninstall(package.file)
        typer.echo(f"{package.file.package} is uninstalled.")


def _delete(name: str, place: str, yes: bool) -> None:
    model = _removable(name, place)
    shared = "LM Studio will have it no more." if place == "lm-studio" else "Other programs may use it, too."
    _ask(f"Delete {model.id}, {size(model.nbytes)}, from {PLACES[place]}, {model.folder}? {shared}", yes)
    delete(model)
    typer.echo(f"{model.id} is deleted from {PLACES[place]}.")


def _removable(name: str, place: str) -> StoredModel:
    """Everything under the id in that place.

    Raises:
        OptionError: there is nothing, or it is only a part.
    """
    if name.count("/") > 1 and is_repository_id(name):
        raise OptionError(f"{name} names a file: a repository is removed as a whole")
    found = [model for model in stored_models() if name == model.id or model.id.startswith(f"{name}/")]
    parts = [model for model in found if model.place == place]
    if parts:
        return replace(parts[0], id=name, path=None, nbytes=sum(part.nbytes for part in parts))
    if found and place == "hugging-face":
        raise OptionError(
            f"{name} is in LM Studio's folder, {found[0].folder}, not in Hugging Face's cache: delete it with LM "
            "Studio, or with --lm-studio"
        )
    raise OptionError(f"{name} is not in {PLACES[place]}; `mlx-specprefill list` shows what is there")


def _ask(question: str, yes: bool) -> None:
    if not yes:
        typer.confirm(question, abort=True, err=True)
    else:
        typer.echo(question.partition("?")[0], err=True)


def _print(title: str | None, columns: tuple[str, ...] | None, rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(title=title, title_justify="left", show_edge=False, show_header=columns is not None)
    listed = list(rows)
    for index in range(len(columns or listed[0])):
        table.add_column(columns[index] if columns else "", overflow="fold")
    for row in listed:
        table.add_row(*row)
    if listed:
        Console().print(table, markup=False, highlight=False)
        typer.echo()
