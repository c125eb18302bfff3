"""Every wrapper around mlx and mlx-lm: what it wraps exists, installing it again changes nothing, and it is inert."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import reduce
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill.adapters.capture import QueryCapture, record_attention, wrap_attention
from mlx_specprefill.adapters.patches import PATCHES, install_patches
from mlx_specprefill.adapters.recurrence import record_recurrence
from tests.support.oracle import build

ROOT = Path(__file__).parents[2]
NAMES = list(PATCHES)
# A tiny model that calls it, where that is not the one of its own file's name.
CALLER = {
    "mlx.core:fast.rope": "llama",
    "mlx.core:fast.scaled_dot_product_attention": "llama",
    "mlx.core:softmax": "gemma2",
    "mlx_lm.models.rope_utils:DynamicNTKScalingRoPE.__call__": "llama+dynamic",
}


pytestmark = pytest.mark.usefixtures("on_the_cpu")


def holder(name: str) -> tuple[Any, str]:
    module, _, path = name.partition(":")
    *outer, attribute = path.split(".")
    return reduce(getattr, outer, importlib.import_module(module)), attribute


def current(name: str) -> Any:
    return getattr(*holder(name))


def caller(name: str) -> nn.Module:
    return build(CALLER.get(name) or name.partition(":")[0].rpartition(".")[2])


def logits(model: nn.Module) -> mx.array:
    """Return the logits of a prompt in two chunks and of two tokens after it."""
    cache = make_prompt_cache(model)
    chunks = [[5, 9, 2, 7, 11], [3, 8], [6], [4]]
    return mx.concatenate([model(mx.array([chunk]), cache=cache) for chunk in chunks], axis=1)


@pytest.mark.parametrize("name", NAMES)
def test_it_exists_and_is_wrapped_once(name: str) -> None:
    assert callable(current(name))
    install_patches()
    installed = current(name)
    assert callable(installed.__wrapped__)
    assert not hasattr(installed.__wrapped__, "__wrapped__")
    install_patches()
    assert current(name) is installed


@pytest.mark.parametrize("name", NAMES)
def test_an_ordinary_call_passes_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a model that calls it are bit-equal with the wrapper and with what it wraps."""
    model, calls = caller(name), []
    wrapped = logits(model)
    stock = current(name).__wrapped__

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return stock(*args, **kwargs)

    monkeypatch.setattr(*holder(name), counted)
    assert mx.array_equal(wrapped, logits(model))
    assert calls


def test_attention_is_passed_every_keyword() -> None:
    given = {"scale": 0.5, "mask": "causal", "sinks": None, "force_fused": True, "stream": mx.cpu}
    x = mx.zeros((1, 1, 2, 8))
    attention: Any = lambda q, k, v, **keywords: keywords  # noqa: E731
    assert wrap_attention(attention)(x, x, x, **given) == given


def test_nothing_is_wrapped_before_its_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "mlx_lm.models.mistral4"
    importlib.import_module(name)
    install_patches()
    monkeypatch.delitem(sys.modules, name)
    install_patches()
    assert name not in sys.modules


@pytest.mark.parametrize("wrap", list(dict.fromkeys(PATCHES.values())), ids=lambda wrap: wrap.__name__)
def test_the_table_in_the_documentation_lists_it(wrap: Any) -> None:
    names = [name for name, its in PATCHES.items() if its is wrap]
    section = (ROOT / "docs/development/architecture.md").read_text().partition("## Patches")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == len(set(PATCHES.values()))
    named = "`RECURRENT`" if len(names) > 2 else names[0].partition(":")[2]
    (row,) = [row for row in rows if f"{named}`" in row or f"{named} " in row]
    *_, tested_in, _ = row.split("`")
    assert (ROOT / "tests" / tested_in).is_file()


# --- recordings nest -------------------------------------------------------------------------------------------------


def forwards(model: nn.Module, tokens: int) -> None:
    mx.eval(model(mx.array([[1] * tokens]), cache=make_prompt_cache(model)))


RECORDINGS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]], Callable[[Any], int]]] = {
    "attention": ("llama", record_attention, lambda record: len(record.queries)),
    "recurrence": ("qwen3_5", record_recurrence, len),
}


@pytest.mark.parametrize("kind", RECORDINGS)
def test_nested_recordings_both_get_what_is_theirs(kind: str) -> None:
    """The inner one gets its own forward; the outer one those before and after it, an exception in between or not."""
    name, recording, count = RECORDINGS[kind]
    model = build(name)
    with recording() as alone:
        forwards(model, 2)
    with recording() as outer:
        forwards(model, 2)
        with suppress(KeyError), recording() as inner:
            forwards(model, 3)
            raise KeyError
        forwards(model, 2)
    forwards(model, 2)
    assert count(alone) == count(inner) > 0
    assert count(outer) == 2 * count(alone)


def test_an_inner_capture_leaves_the_outer_one_active() -> None:
    """One wrapper feeds two captures of different kinds."""
    model, capture = build("llama"), QueryCapture(1, 1)
    with record_attention() as record:
        with capture.row(1):
            forwards(model, 1)
        forwards(model, 1)
    assert capture.layers == [len(record.queries)]
