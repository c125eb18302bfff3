"""A pair is loaded on one thread and run on another, where MLX can't compute what the first one has left lazy."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import load as mlx_load
from mlx_lm import utils
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_specprefill import (
    Engine,
    GenerationRequest,
    LoadError,
    ModelPair,
    PrefillReport,
    SpecPrefillOptions,
    load_pair,
    make_pair,
)
from mlx_specprefill.adapters.mtp import MTPHead
from mlx_specprefill.config import keep_pct
from mlx_specprefill.loading import one_model
from mlx_specprefill.selection.heads import DraftHeads, Head
from mlx_specprefill_server import open_pair, pair_loading
from tests.support.gguf_files import tiny as tiny_gguf
from tests.support.oracle import build, on_the_cpu_unfused, runnable, tiny_models
from tests.support.tiny import CONFIGS, generated, random_prompt, save_checkpoint, tiny_head, tiny_model, tokenizer

T = TypeVar("T")


def elsewhere(run: Callable[[], T]) -> T:
    """On another thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def forward(model: nn.Module) -> None:
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[2, 3, 4]]), cache=cache), model(mx.array([[5]]), cache=cache))


def save(folder: Path, name: str) -> Path:
    """A checkpoint of one of the oracle's tiny models, with no more than the name of a tokenizer."""
    folder.mkdir()
    arrays = dict(nn.utils.tree_flatten(build(name).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    tiny = tiny_models()[name]
    (folder / "tokenizer.json").write_text("{}")  # not read
    (folder / "config.json").write_text(json.dumps({**tiny.config, "model_type": tiny.architecture}))
    return folder


@pytest.fixture
def any_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers refuses the configurations of some of these models."""
    for module in (utils, one_model):
        monkeypatch.setattr(module, "load_tokenizer", lambda *_, **__: tokenizer())


@pytest.mark.parametrize("name", runnable())
@pytest.mark.usefixtures("any_tokenizer")
def test_a_model_of_any_architecture(name: str, tmp_path: Path) -> None:
    pair = load_pair(save(tmp_path / "model", name))
    with on_the_cpu_unfused():
        elsewhere(lambda: forward(pair.target))


@pytest.mark.usefixtures("any_tokenizer")
def test_a_model_that_mlx_lm_has_loaded(tmp_path: Path) -> None:
    target, draft = (mlx_load(str(save(tmp_path / name, "llama+rope3")))[0] for name in ("target", "draft"))
    pair = make_pair(target, tokenizer(), {"max_position_embeddings": 128}, draft=draft)
    elsewhere(lambda: forward(pair.draft))


def test_a_gguf_file(tmp_path: Path) -> None:
    made = tiny_gguf("llama")
    made.metadata |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    pair = load_pair(made.write(tmp_path / "tiny.gguf"))
    elsewhere(lambda: forward(pair.target))


def test_an_mtp_head(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "partial_rotary_factor": 0.5}
    text = {**CONFIGS["qwen3_5"]["text_config"], "rope_parameters": rope}
    folder = save_checkpoint(tmp_path / "target", "qwen3_5", text_config=text)
    arrays = nn.utils.tree_flatten(tiny_head(tiny_model("qwen3_5")).layers.parameters())
    mx.save_safetensors(str(folder / "mtp.safetensors"), {f"mtp.{name}": array for name, array in arrays})
    head = load_pair(folder).own_parts["mtp"]
    assert isinstance(head, MTPHead), head

    def run() -> None:
        hidden, following = mx.zeros((1, 3, head.layers.norm.weight.size)), mx.array([[2, 3, 4]])
        mx.eval(head.logits(head(hidden, following, KVCache())))

    elsewhere(run)


SCALED = {"llama": "llama+rope3", "gpt_oss": "gpt_oss+yarn"}


def scaled(folder: Path, family: str) -> Path:
    """A checkpoint whose frequencies are worked out when it is loaded."""
    return save_checkpoint(folder, family, rope_scaling=tiny_models()[SCALED[family]].config["rope_scaling"])


def report_of(engine: Engine) -> PrefillReport:
    """Return the report of a request that asks for a sparse prefill."""
    options = SpecPrefillOptions(True, keep_pct("0.3"))
    _, last = generated(engine.generate(GenerationRequest(random_prompt(400), 4, specprefill=options)))
    return last.report


@pytest.mark.parametrize("family", SCALED)
def test_a_second_start(family: str, tmp_path: Path) -> None:
    """The draft's heads come from a file, so no forward of it ran while it was loaded."""
    target, draft = scaled(tmp_path / "target", family), scaled(tmp_path / "draft", family)
    heads = DraftHeads((Head(1, 3, 0.5),), 2, CONFIGS[family]["num_hidden_layers"], {"copy": 1.0})
    (draft / "heads.json").write_text(json.dumps(heads.to_dict()))
    with Engine(load_pair(target, draft)) as engine:
        report = report_of(engine)
    assert (report.mode, report.reason) == ("sparse", "requested")


class Hidden(nn.Module):
    """Scales embeddings by a lazy array that nobody finds among the module's own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.one = SimpleNamespace(array=mx.ones(1) * 1)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.inner(tokens) * self.one.array

    def as_linear(self, x: mx.array) -> mx.array:
        return self.inner.as_linear(x)


def test_an_engine_loads_on_its_own_thread(tmp_path: Path) -> None:
    """There even an array that can't be found may stay lazy."""

    def read(pause: Callable[[], None]) -> ModelPair:
        target = tiny_model("llama")
        target.model.embed_tokens = Hidden(target.model.embed_tokens)
        pause()
        return make_pair(target, tokenizer(), {"max_position_embeddings": 4096})

    with Engine.load(read) as engine:
        assert report_of(engine).mode == "full"
    assert not mlx_threads()


def mlx_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mlx-specprefill-engine"]


def test_what_loading_raises_ends_the_thread(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no model here"):
        Engine.load(lambda pause: load_pair(tmp_path))
    assert not mlx_threads()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Heed SIGINT, which a shell has its background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_loading_can_be_interrupted() -> None:
    """By Ctrl-C, as soon as it tells how far it is."""

    def read(pause: Callable[[], None]) -> ModelPair:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while True:
            pause()

    with pytest.raises(KeyboardInterrupt):
        Engine.load(read)
    assert not mlx_threads()


def test_a_pair_in_a_program_is_loaded_on_its_engines_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    threads = []

    def loading(*args: Any, **options: Any) -> ModelPair:
        threads.append(threading.current_thread().name)
        return load_pair(*args, **options)

    monkeypatch.setattr(pair_loading, "load_pair", loading)
    folder = save_checkpoint(tmp_path / "target", "llama")
    (folder / "heads.json").write_text(json.dumps(DraftHeads((Head(1, 0, 1.0),), 2, 3, {"copy": 1.0}).to_dict()))
    with open_pair(target=str(folder), draft=str(folder), specprefill_threshold=1000):
        assert threads == [thread.name for thread in mlx_threads()]
    assert not mlx_threads()
