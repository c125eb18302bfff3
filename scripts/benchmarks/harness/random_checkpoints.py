"""Random weights in a real shape as checkpoints that any server loads, with the tokenizer of a bundled pair.

What the weights say does not change the time they take, but for answers: each of these ends at once, as after a call
of a tool, so a conversation goes on exactly where its cache ends.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_specprefill.shapes import Config, fewer_layers, find_shape, narrower, random_model

from . import BenchError

__all__ = ["save_random"]

CONTEXT = 131_072
END = "<|im_end|>"


def save_random(
    name: str, layers: int, draft_layers: int, narrow: int, tokenizer: Path, folder: Path, template: str
) -> tuple[Path, Path]:
    """Folders of a target and a draft.

    Args:
        narrow: divides every width but the heads' own.
        tokenizer: a folder with one whose ids fit any vocabulary.
        template: for chats.

    Raises:
        InvalidRequestError: there is no such shape.
        BenchError: its architecture has no final norm where others have it.
    """
    shape = find_shape(name)
    words = _with_end_first(json.loads((tokenizer / "tokenizer.json").read_text()))
    sides = (("target", shape.target, layers), ("draft", shape.draft, draft_layers))
    target, draft = (
        _save(narrower(fewer_layers(config, depth), narrow), words, tokenizer, folder / side, template)
        for side, config, depth in sides
    )
    return target, draft


def _save(config: Config, words: dict[str, Any], tokenizer: Path, folder: Path, template: str) -> Path:
    config = {**config, "vocab_size": len(words["model"]["vocab"]), "max_position_embeddings": CONTEXT}
    mx.random.seed(0)
    weights = dict(tree_flatten(random_model(config).parameters()))
    if "model.norm.weight" not in weights:
        raise BenchError(f"{config['model_type']} has no model.norm: choose another --shape")
    weights["model.norm.weight"] *= 0  # so all logits are equal, and the first id is the likeliest
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0, "torch_dtype": "float32"}))
    (folder / "tokenizer.json").write_text(json.dumps(words))
    shutil.copy(tokenizer / "tokenizer_config.json", folder)
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said |= {"chat_template": template, "model_max_length": CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def _with_end_first(words: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer, in which the end of a turn has the first id."""
    vocabulary, ids = words["model"]["vocab"], {token["id"]: token for token in words["added_tokens"]}
    end = next(token for token in words["added_tokens"] if token["content"] == END)
    if end["id"]:
        other = next(name for name, number in vocabulary.items() if number == 0)
        vocabulary[other], vocabulary[END] = end["id"], 0
        if 0 in ids:
            ids[0]["id"] = end["id"]
        end["id"] = 0
        words["added_tokens"].sort(key=lambda token: token["id"])
    return words
