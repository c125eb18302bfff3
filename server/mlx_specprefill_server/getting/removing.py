"""Deleting models from Hugging Face's cache, and from LM Studio's folder if that is said."""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub import constants

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
    """The folder of that repository: huggingface_hub deletes by commit, which a copied repository has, too."""
    shutil.rmtree(folder)
    shutil.rmtree(Path(constants.HF_HUB_CACHE) / ".locks" / folder.name, ignore_errors=True)
