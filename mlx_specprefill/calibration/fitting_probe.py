"""Fits the probe that says which lines of a prompt ask: a logistic regression on what a draft's caches hold of them.

Learnt from `asking_prompts`: lines of orders against all others of their prompt, of documents, rules, templates,
answers and reminders. Only lines of one prompt are compared, so each prompt's mean is taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..arrays import Bools, Floats, Spans
from ..selection.heads import LineProbe, whole_values
from ..selection.question_lines import lines_of
from ..selection.text import TextReader
from .asking_prompts import AskingPrompt, asking_prompts
from .texts import located, rendered

Floats64 = npt.NDArray[np.float64]

_FIRST, _CACHES = 7, 4  # layers that any draft runs, and the last ones of these, whose values are read
_FEWEST = 24  # prompts, whatever the time
_RIDGE = 300.0  # in features of unit variance
_STEPS = 6  # of Newton's method; more change nothing


def fit_probe(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    limit_s: float,
    on_progress: Callable[[int, int], None] | None = None,
) -> LineProbe | None:
    """Return the probe of a draft; None where none of its caches holds the whole prompt, or its template takes none.

    Args:
        model: the draft's layers that run.
        limit_s: seconds after which no more is read, once there are two dozen prompts.
        on_progress: called with the number of prompts read and of all prompts.
    """
    reader, prompts, read = TextReader(tokenizer), list(asking_prompts()), list[tuple[Floats, Bools]]()
    caches, until = tuple[int, ...](), time.monotonic() + limit_s
    for number, prompt in enumerate(prompts):
        if len(read) >= _FEWEST and time.monotonic() > until:
            break
        try:
            text = rendered(tokenizer, prompt.messages)
        except (TemplateError, ValueError):  # some take no system message
            continue
        if prompt.order not in text:  # and some leave one out
            continue
        cache, lines, asks = _read(model, tokenizer, reader, prompt, text)
        held = list(whole_values(cache))
        caches = tuple(range(len(held))[:_FIRST][-_CACHES:])
        if not caches:
            return None
        values = [np.array(held[number].astype(mx.float32)) for number in caches]
        read.append((_features(values, lines), asks))
        if on_progress is not None:
            on_progress(number + 1, len(prompts))
    mx.clear_cache()
    if not read:
        return None
    return LineProbe(caches, fitted(read).astype(np.float16).tobytes())


def _read(
    model: nn.Module, tokenizer: TokenizerWrapper, reader: TextReader, prompt: AskingPrompt, text: str
) -> tuple[Sequence[Any], Spans, Bools]:
    """Let the draft read a prompt. Return its cache, the prompt's lines, and which of them ask."""
    at = text.index(prompt.order)
    tokens, places = located(tokenizer, text, {"order": (at, at + len(prompt.order))})
    lines = lines_of((), tokens.size, reader.read(tokens).units)
    start, end = places["order"]
    shared = np.clip(np.minimum(lines[:, 1], end) - np.maximum(lines[:, 0], start), 0, None)
    asks: Bools = 2 * shared >= np.minimum(lines[:, 1] - lines[:, 0], max(end - start, 1))
    cache = make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=cache)
    mx.eval([part.state for part in cache])
    return cache, lines, asks


def _features(held: Sequence[Floats], lines: Spans) -> Floats:
    """Return the mean and the last token's values of each line, (N, 2 F), from those of caches, (H, S, D) each."""
    values = np.concatenate([array.swapaxes(0, 1).reshape(array.shape[1], -1) for array in held], axis=1)
    means = [values[start:end].mean(axis=0) for start, end in lines.tolist()]
    return np.concatenate([np.stack(means), values[lines[:, 1] - 1]], axis=1)


def fitted(read: Sequence[tuple[Floats, Bools]]) -> Floats64:
    """Return the weights (F,) of features (N, F) that tell lines that ask from the others of each prompt.

    Newton's method on as many unknowns as there are lines, of which there are fewer than features.
    """
    rows = np.concatenate([features - features.mean(axis=0) for features, _ in read]).astype(np.float64)
    asks = np.concatenate([asks for _, asks in read])
    scale = rows.std(axis=0) + 1e-6
    rows /= scale
    alike = rows @ rows.T / _RIDGE
    share = np.where(asks, 1 / max(asks.sum(), 1), 1 / max((~asks).sum(), 1)) * asks.size / 2  # both kinds count alike
    said, offset = np.zeros(asks.size), 0.0
    for _ in range(_STEPS):
        likely = 1 / (1 + np.exp(-np.clip(said + offset, -30, 30)))
        weight = np.maximum(share * likely * (1 - likely), 1e-4)
        wanted = said + offset + share * (asks - likely) / weight
        system = np.ones((asks.size + 1, asks.size + 1))
        system[:-1, :-1], system[-1, -1] = alike + np.diag(1 / weight), 0
        solved = np.linalg.solve(system, np.append(wanted, 0))
        duals, offset = solved[:-1], solved[-1]
        said = alike @ duals
    found: Floats64 = rows.T @ duals / _RIDGE / scale
    return found
