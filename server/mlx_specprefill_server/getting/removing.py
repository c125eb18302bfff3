"""Deleting models from Hugging Face's cache, and from LM Studio's folder if that is said."""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub import constants, scan_cache_dir

from .inventory import StoredModel

__all__ = ["delete"]


def delete(model: StoredModel) -> None:
    """Everything under its id in that place.

    Raises:
        OSError: something can't be deleted.
    """
    if model.place == "hugging-face":
        _from_cache(model.folder)
    else:
        shutil.rmtree(model.folder)


def _from_cache(folder: Path) -> None:
    """As huggingface_hub does it, which knows what repositories share; what it takes for broken, whole."""
    found = scan_cache_dir(constants.HF_HUB_CACHE)
    commits = [one.commit_hash for repo in found.repos if repo.repo_path.name == folder.name for one in repo.revisions]
    if commits:
        found.delete_revisions(*commits).execute()
    if folder.exists():
        shutil.rmtree(folder)
    shutil.rmtree(Path(constants.HF_HUB_CACHE) / ".locks" / folder.name, ignore_errors=True)
