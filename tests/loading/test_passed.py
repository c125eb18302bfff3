"""A model that passed the probe is not probed again as long as nothing has changed; a refusal is not remembered."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specprefill import LoadedModels, load_pair
from mlx_specprefill.adapters import passed, probe
from mlx_specprefill.adapters.heads import DraftHeads, Head
from mlx_specprefill.adapters.passed import PassedChecks
from mlx_specprefill.adapters.rope import PositionMappedRoPE
from mlx_specprefill_server import pair_loading
from mlx_specprefill_server.pairs import Pair
from mlx_specprefill_server.settings import Settings
from tests.support.gguf_files import tiny
from tests.support.tiny import save_checkpoint, tiny_model

GAPS = "a chunk with gaps differs from the same tokens fed one by one"
LAYERS = 3  # of the tiny model
HEADS = DraftHeads((Head(0, 0, 1.0),), 1, LAYERS, {})


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checks whose forwards ran."""
    ran: list[str] = []
    for name in ("probe_sparse", "probe_staged"):
        real = getattr(probe, name)
        monkeypatch.setattr(probe, name, lambda model, name=name, real=real: (ran.append(name), real(model))[1])
    return ran


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "model", "llama")


@pytest.fixture
def known(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "probes.json"


def closing_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PositionMappedRoPE.__call__

    def shifted(self, x, dims, *args, offset=0, **kwargs):
        if isinstance(offset, mx.array) and offset.ndim == 2:
            offset = offset[:, :1] + mx.arange(offset.shape[1])[None]
        return real(self, x, dims, *args, offset=offset, **kwargs)

    monkeypatch.setattr(PositionMappedRoPE, "__call__", shifted)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_the_second_load_runs_no_probe(tmp_path: Path, model: Path, known: Path, probed: list[str], kind: str) -> None:
    where = model if kind == "folder" else tiny("llama").write(tmp_path / "tiny.gguf")
    assert load_pair(where, where, probes=known).sparse_refusal is None
    assert probed == ["probe_sparse"]
    assert load_pair(where, where, probes=known).sparse_refusal is None
    assert probed == ["probe_sparse"]


def test_nor_that_of_two_parts(model: Path, known: Path, probed: list[str]) -> None:
    assert load_pair(model, "self", heads=HEADS, probes=known).stages is not None
    assert set(probed) == {"probe_sparse", "probe_staged"}
    probed.clear()
    assert load_pair(model, "self", heads=HEADS, probes=known).stages is not None
    assert probed == []


def test_every_cut_is_probed(model: Path, known: Path, probed: list[str]) -> None:
    """The draft may end at another layer the next time."""
    load_pair(model, "self", heads=HEADS, probes=known)
    probed.clear()
    load_pair(model, "self", heads=replace(HEADS, depth=2), probes=known)
    assert probed == ["probe_staged"]


def test_without_a_file_it_always_runs(model: Path, known: Path, probed: list[str]) -> None:
    """As in `doctor`."""
    load_pair(model, model, probes=known)
    for _ in range(2):
        load_pair(model, model)
    assert probed == ["probe_sparse"] * 3


Change = Callable[[Path, pytest.MonkeyPatch], object]


def other_weights(model: Path, patch: pytest.MonkeyPatch) -> None:
    """A file of the same size and time."""
    weights = model / "model.safetensors"
    then = weights.stat()
    shutil.rmtree(model)
    save_checkpoint(model, "llama", seed=1)
    os.utime(weights, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert weights.stat().st_size == then.st_size


def rewritten(model: Path, patch: pytest.MonkeyPatch) -> None:
    """All samples miss the change, if there is one."""
    os.utime(model / "model.safetensors", ns=(1, 1))


def other_theta(model: Path, patch: pytest.MonkeyPatch) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))


def other_code(model: Path, patch: pytest.MonkeyPatch) -> None:
    folder = model.parent / "code"
    folder.mkdir()
    (folder / "attention.py").write_text("changed = True")
    patch.setattr(passed, "_OF_MODELS", (*passed._OF_MODELS, folder))


def other_mlx(model: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(passed, "version", lambda name: "0.0.1" if name == "mlx" else "1")


CHANGES: list[Change] = [
    other_weights,
    rewritten,
    other_theta,
    other_code,
    other_mlx,
    lambda model, patch: patch.setattr(passed, "version", lambda name: "0.0.1" if name == "mlx-lm" else "1"),
    lambda model, patch: patch.setattr(passed, "__version__", "9.9"),
    lambda model, patch: patch.setattr(mx, "device_info", lambda: {"architecture": "applegpu_g99"}),
    lambda model, patch: patch.setattr(platform, "platform", lambda: "macOS-99"),
    lambda model, patch: patch.setenv("MLX_ENABLE_TF32", "0"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_probes_again(
    model: Path, known: Path, probed: list[str], monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    load_pair(model, model, probes=known)
    change(model, monkeypatch)
    load_pair(model, model, probes=known)
    assert probed == ["probe_sparse"] * 2


def test_another_dtype_probes_again(model: Path, known: Path, probed: list[str]) -> None:
    for dtype in ("float32", "bfloat16", "float32"):
        load_pair(model, model, dtype=dtype, probes=known)
    assert probed == ["probe_sparse"] * 2


def test_a_refusal_is_not_remembered(
    model: Path, known: Path, probed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        closing_gaps(broken)
        for _ in range(2):
            assert load_pair(model, model, probes=known).sparse_refusal == GAPS
    assert not known.exists()
    assert load_pair(model, model, probes=known).sparse_refusal is None
    assert len(probed) == 3


def test_a_wrong_layer_of_a_model_that_passed_is_refused(known: Path) -> None:
    """In the same file: another class, which even has the name of the right one."""
    model = tiny_model("llama")
    checks = PassedChecks(known, "the file", {"model_type": "llama"})
    assert checks.run("positions", model, lambda: probe.probe_sparse(model)) is None
    rope = model.layers[1].self_attn.rope
    kind = type(rope)

    def ignoring(self, x, *args, **kwargs):
        return kind.__call__(self, x)

    rope.__class__ = type(kind.__name__, (kind,), {"__call__": ignoring, "__module__": kind.__module__})
    assert checks.run("positions", model, lambda: probe.probe_sparse(model)) is not None


def test_a_model_in_memory_is_not_taken_for_its_files(model: Path, known: Path, probed: list[str]) -> None:
    """They may have changed since another pair read them."""
    loaded = LoadedModels()
    first = load_pair(model, probes=known, loaded=loaded)
    rewritten(model, pytest.MonkeyPatch())
    load_pair(model, "self", probes=known, loaded=loaded)
    assert first.target is not None
    assert not known.exists()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}'])
def test_a_damaged_file_probes_again(model: Path, known: Path, probed: list[str], content: str) -> None:
    known.parent.mkdir()
    known.write_text(content)
    for _ in range(2):
        load_pair(model, model, probes=known)
    assert probed == ["probe_sparse"]


def test_the_file_stays_small(known: Path) -> None:
    model = tiny_model("llama")
    for number in range(passed._MOST + 5):
        PassedChecks(known, str(number)).run("positions", model, lambda: None)
    assert len(json.loads(known.read_text())) == passed._MOST
    assert PassedChecks(known, str(passed._MOST + 4)).run("positions", model, lambda: "runs") is None
    assert PassedChecks(known, "0").run("positions", model, lambda: "runs") == "runs"


def test_serve_keeps_them_beside_its_costs(tmp_path: Path, model: Path, probed: list[str]) -> None:
    settings = Settings(calibration_file=tmp_path / "costs.json")
    for _ in range(2):
        pair_loading.load(Pair(target=str(model), draft=str(model)), "auto", settings)
    assert probed == ["probe_sparse"]
    assert (tmp_path / "probes.json").is_file()
