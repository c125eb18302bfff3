"""The self-test passes here, and each of its checks fails when what it looks at is broken."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_specprefill import Check, check_device, pair, selftest, sync_ms
from mlx_specprefill.cache import feeding
from mlx_specprefill.cache.positioned import quantize_kv
from mlx_specprefill.engine.decoding import answers
from mlx_specprefill.engine.reading import prefill as engine_prefill
from mlx_specprefill.selftest import FAMILIES, VOCAB, Case, Dtype, save_checkpoint
from mlx_specprefill.speculative import speculative_row as speculative_row
from mlx_specprefill.speculative.acceptance import Verdict
from mlx_specprefill.speculative.strategies import STRATEGIES

Patch = pytest.MonkeyPatch


def failed(found: list[Check]) -> set[str]:
    assert found
    return {check.operation for check in found if check.state == "failed"}


# --- all is well ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("llama",), pytest.param(tuple(FAMILIES), marks=pytest.mark.nightly)])
def test_it_passes_here(names: tuple[str, ...], monkeypatch: Patch) -> None:
    monkeypatch.setattr(selftest, "FAMILIES", {name: FAMILIES[name] for name in names})
    found = list(check_device())
    assert [check for check in found if check.state == "failed"] == []
    tried = {check.model for check in found if check.state == "ok"}
    assert tried == set(names)
    drafted = {f"drafted by {name}" for name in STRATEGIES if name != "mtp" or "qwen3_5" in names}
    assert drafted <= {check.operation for check in found}
    assert all(check.error is not None and check.error <= (check.limit or 0) for check in found if check.state == "ok")


def test_what_the_cpu_backend_can_not_do_is_listed() -> None:
    """Experts that are not packed, in half precision."""
    with mx.stream(mx.cpu):
        missing = {name: selftest._unsupported(config, "bfloat16") for name, config in FAMILIES.items()}
        assert selftest._unsupported(FAMILIES["gpt_oss"], "float32") is None
    assert [name for name, words in missing.items() if words] == ["gpt_oss"]
    assert "float32" in str(missing["gpt_oss"])


# --- what is broken is found ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of_family(name: str) -> Path:
        if name not in made:
            made[name] = save_checkpoint(tmp_path_factory.mktemp("family") / "model", FAMILIES[name])
        return made[name]

    return of_family


def operations(folder: Callable[[str], Path], name: str = "llama", dtype: Dtype = "float32") -> list[Check]:
    return list(selftest._operations(Case(name, folder(name), dtype)))


def read_backwards(monkeypatch: Patch) -> None:
    def backwards(model: Any, cache: Any, tokens: Any, *others: Any, **named: Any) -> Any:
        return feeding.feed(model, cache, tokens[::-1], *others, **named)

    monkeypatch.setattr(engine_prefill, "feed", backwards)


def place_nothing(monkeypatch: Patch) -> None:
    monkeypatch.setattr(engine_prefill, "place", lambda cache, positions: None)


def accept_what_is_wrong(monkeypatch: Patch) -> None:
    monkeypatch.setattr(speculative_row, "verify", lambda p, q, proposed, rng: Verdict(0, (int(p[0]) + 1) % VOCAB))


def keep_two_bits(monkeypatch: Patch) -> None:
    monkeypatch.setattr(answers, "quantize_kv", lambda cache, bits: quantize_kv(cache, 2))


DRAFTED = {f"drafted by {name}" for name in STRATEGIES if name != "mtp"}
SPARSE = {"sparse prefill", "answers beside each other", *DRAFTED}
FULL = {"full prefill", "answers beside each other", "quantised KV cache"}


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (read_backwards, FULL | SPARSE),
        (place_nothing, SPARSE),
        (accept_what_is_wrong, DRAFTED),
        (keep_two_bits, {"quantised KV cache"}),
    ],
)
def test_a_broken_operation_fails(
    broken: Callable[[Patch], None], found: set[str], folder: Callable[[str], Path], monkeypatch: Patch
) -> None:
    broken(monkeypatch)
    assert failed(operations(folder)) == found


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.nightly)])
def test_half_precision_hides_no_wrong_positions(
    dtype: Dtype, folder: Callable[[str], Path], monkeypatch: Patch
) -> None:
    place_nothing(monkeypatch)
    assert failed(operations(folder, dtype=dtype)) >= {"sparse prefill", "answers beside each other"}


@pytest.mark.parametrize("name", ["llama", "gpt_oss", pytest.param("qwen3", marks=pytest.mark.nightly)])
def test_lazy_frequencies_fail_on_the_second_thread(
    name: str, folder: Callable[[str], Path], monkeypatch: Patch
) -> None:
    """All of them have RoPE frequencies that are no parameters; the probe of a target has computed its own."""
    monkeypatch.setattr(pair, "mx", SimpleNamespace(eval=lambda *modules: None))
    found = operations(folder, name)
    assert {"sparse prefill", "answers beside each other"} <= failed(found)
    assert "There is no Stream" in "".join(check.words for check in found)


def test_a_model_that_can_not_be_loaded_fails(monkeypatch: Patch) -> None:
    def refuse(*given: Any, **more: Any) -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(selftest, "FAMILIES", {"llama": FAMILIES["llama"]})
    monkeypatch.setattr(selftest, "Case", refuse)
    found = [check for check in check_device() if check.model == "llama"]
    assert [(check.operation, check.words) for check in found] == [
        ("loading and starting", "OSError: no such thing")
    ] * 3


@pytest.mark.parametrize("error", [math.nan, math.inf, 0.2])
def test_no_number_and_too_large_a_number_fail(error: float) -> None:
    assert selftest._run_check("model", "float32", "operation", 0.1, lambda: error).state == "failed"


def test_a_synchronisation_takes_time() -> None:
    assert sync_ms() > 0
