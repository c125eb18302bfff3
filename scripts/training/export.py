"""Write a trained model in the layout that `mlx_lm.load` and other readers of such folders expect."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from . import tokenizer as chat
from .families import family_of
from .network import Network


def export(model: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights (float16), configuration and tokenizer to `folder`."""
    family = family_of(model.sizes)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().to(torch.float16).clone() for name, value in family.weights(model)}
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the writer makes it private
    end, pad = (tokenizer.token_to_id(token) for token in (chat.END, chat.PAD))
    special = {"torch_dtype": "float16", "bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write(folder / "config.json", family.config(model.sizes) | special)
    _write(folder / "generation_config.json", {"eos_token_id": end, "do_sample": False})
    _write(folder / "tokenizer_config.json", _tokenizer_config(model.sizes.max_position_embeddings))


def read(model: Network, folder: Path) -> None:
    """Fill `model` with the weights that `export` wrote to `folder`.

    Raises:
        ValueError: the weights are of another model, or exported in a form that can't be read back.
    """
    stored = load_file(folder / "model.safetensors")
    family = family_of(model.sizes)
    with torch.no_grad():
        for name, value in family.weights(model):
            value.copy_(stored[name])
    if not all(torch.equal(value.half(), stored[name]) for name, value in family.weights(model)):
        raise ValueError(f"{folder} can't be read back into a network of this family")


def average(folder: Path, other: Path, share: float) -> None:
    """Move the weights in `folder` towards those in `other` by `share` in [0, 1], in place.

    A model that went on training from `other` gets back some of what it forgot and keeps most of what it learned
    (https://arxiv.org/abs/2109.01903).
    """
    path = folder / "model.safetensors"
    ours, theirs = load_file(path), load_file(other / "model.safetensors")
    mixed = {name: torch.lerp(value.float(), theirs[name].float(), share).half() for name, value in ours.items()}
    save_file(mixed, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _tokenizer_config(length: int) -> dict[str, object]:
    """Return the content of tokenizer_config.json, chat template included."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": chat.END,
        "pad_token": chat.PAD,
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": chat.CHAT_TEMPLATE,
    }


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
