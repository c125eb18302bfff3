"""Tiny random models, and their reference: the same weights in float32 on the CPU.

The reference takes another way than the tested code, so that it is meaningful without a GPU, too: a forward without a
cache, one token at a time, the attention of a single row.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ..adapters.capture import DraftHeads, Head, QueryCapture
from ..adapters.mtp import ARCHITECTURES, MTPLayers
from ..adapters.staged import StagedModel
from ..cache.positioned import make_positioned_cache, place
from ..loading import load_pair
from ..reading import read_model
from ..specprefill.staged_prefill import UpperLayersModel

__all__ = ["FAMILIES", "PROMPT", "VOCAB", "Case", "Dtype", "Floats", "M", "Tokens", "floats", "save_checkpoint"]

Dtype = Literal["float32", "bfloat16", "float16"]
Tokens = npt.NDArray[np.int32]
Floats = npt.NDArray[np.floating[Any]]

VOCAB, M = 128, 128
PROMPT = np.random.default_rng(1).integers(2, VOCAB, M).astype(np.int32)
_DEPTH = 2  # layers, the last of which sees the whole prompt

_SHARED = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_OWN = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
# Metal has kernels for these head sizes. All experts are chosen, because rounding would swap the last ones.
FAMILIES: dict[str, dict[str, Any]] = {name: {**_SHARED, **own} for name, own in _OWN.items()}


def save_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """Write a folder that `load_pair` reads."""
    folder.mkdir()
    mx.random.seed(1)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(_uneven, model.parameters()))
    weights = {}
    if config["model_type"] in ARCHITECTURES:
        head = tree_map(_uneven, MTPLayers(model.language_model.args).parameters())
        weights = {f"mtp.{name}": array for name, array in tree_flatten(head)}
    if "quantization" in config:
        nn.quantize(model, **config["quantization"])
    weights |= dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return folder


def _uneven(array: mx.array) -> mx.array:
    """Scale weights so that attention is not flat. A constant, like a new norm's weight, would hide its factor."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    return array * 1.5 if array.ndim > 1 else array + 0.1 * mx.random.normal(array.shape)


def _heads(config: dict[str, Any]) -> DraftHeads:
    """Return two heads of the last of the first layers; in recurrent models only that layer has attention."""
    recurrent = "mamba_num_heads" in config or "linear_num_key_heads" in config
    heads = tuple(Head(0 if recurrent else _DEPTH - 1, number, 1.0) for number in (0, 1))
    return DraftHeads(heads, _DEPTH, config["num_hidden_layers"], {})


class Case:
    """A tiny model in one dtype, loaded from its checkpoint as `serve` does, and its reference.

    Nothing is calibrated: no forward of a draft runs on the thread that loads it.

    Attributes:
        pair: with the model itself as a draft, loaded once more. `alone`: without a draft. `staged`: with its own first
            layers as a draft.
    """

    def __init__(self, name: str, folder: Path, dtype: Dtype) -> None:
        self.name, self.dtype = name, dtype
        heads = _heads(FAMILIES[name])
        self.pair = load_pair(folder, folder, heads=heads, exit_early=False, dtype=dtype)
        self.alone = load_pair(folder, dtype=dtype)
        self.staged = load_pair(folder, "self", heads=heads, dtype=dtype)
        with _cpu():
            self._exact, _, _ = read_model(folder, dtype, lambda done, total: None)
            self._exact.set_dtype(mx.float32)
            mx.eval(self._exact.parameters())
        self._known: dict[bytes, Floats] = {}

    def after_all(self, answer: Tokens) -> Floats:
        """Return the logits (L, V) of an answer's tokens to the whole prompt, from one forward without a cache."""
        with _cpu():
            return floats(self._exact(mx.array(np.append(PROMPT, answer))[None])[0, M - 1 : -1])

    def after(self, kept: Tokens, answer: Tokens) -> Floats:
        """Return the same after the prompt's tokens `kept`, each fed alone at its position."""
        key = kept.tobytes() + answer.tobytes()
        if key not in self._known:
            with _cpu():
                cache = make_positioned_cache(self._exact)
                self._known[key] = _singly(self._exact, cache, self._exact, cache, kept, answer)
        return self._known[key]

    def after_stages(self, kept: Tokens, answer: Tokens) -> Floats:
        """Return the same after the first layers have read the whole prompt."""
        with _cpu():
            model, cache = StagedModel(self._exact, _DEPTH), make_positioned_cache(self._exact)
            lower, upper = model.split(cache)
            hidden = model.lower(mx.array(PROMPT)[None], cache=lower)[:, mx.array(kept)]
            return _singly(UpperLayersModel(model.upper, hidden), upper, model, cache, kept, answer)

    def last_row(self) -> Floats:
        """Return the attention (M,) of a forward of the last token: the maximum over layers and heads."""
        with _cpu():
            cache, capture = make_prompt_cache(self._exact), QueryCapture(M, 1)
            mx.eval(self._exact(mx.array(PROMPT[None, :-1]), cache=cache))
            with capture.row(M):
                mx.eval(self._exact(mx.array(PROMPT[None, -1:]), cache=cache))
            return floats(capture.rows[0])


@contextmanager
def _cpu() -> Iterator[None]:
    """Run on the CPU without compilation, which on a Mac needs a C++ compiler."""
    mx.disable_compile()
    try:
        with mx.stream(mx.cpu):
            yield
    finally:
        mx.enable_compile()


def _singly(reader: Any, read: list[Any], model: Any, cache: list[Any], kept: Tokens, answer: Tokens) -> Floats:
    """Feed one token at a time, so that RoPE gets an integer: the kept ones to `reader`, the answer to `model`."""
    for position in kept:
        place(read, np.array([position]))
        logits = reader(mx.array(PROMPT[None, position : position + 1]), cache=read)
        mx.eval(logits, [part.state for part in read])
    rows = [logits[0, -1], *(model(mx.array([[token]]), cache=cache)[0, -1] for token in answer[:-1].tolist())]
    return floats(mx.stack(rows))


def floats(array: mx.array) -> Floats:
    """Return the array's numbers in float32."""
    return np.array(array.astype(mx.float32))
