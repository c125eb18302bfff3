"""The probe that says which lines ask: its prompts, its fit, and what it reads of a draft's caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import load_pair
from mlx_specprefill.adapters.depth import first_layers
from mlx_specprefill.calibration import asking_prompts as asking_texts
from mlx_specprefill.calibration import finding_heads, fitting_probe
from mlx_specprefill.calibration.asking_prompts import asking_prompts
from mlx_specprefill.selection.heads import DraftHeads, Head, LineProbe, whole_values
from tests.support.tiny import FAMILIES, random_prompt, tiny_model

DEMO = Path(__file__).resolve().parents[2] / "models/demo/draft"


def test_each_order_is_once_in_its_prompt_in_six_languages() -> None:
    prompts = list(asking_prompts())
    assert len(prompts) >= 60
    assert {prompt.language for prompt in prompts} == {"en", "de", "fr", "es", "zh", "ru"}
    assert [sum(said["content"].count(prompt.order) for said in prompt.messages) for prompt in prompts] == [1] * 64
    assert [prompt.messages for prompt in asking_prompts()] == [prompt.messages for prompt in prompts]


def filled(model: Any, tokens: int) -> list[Any]:
    cache = list(make_prompt_cache(model))
    model(mx.array(random_prompt(tokens))[None], cache=cache)
    return cache


@pytest.mark.parametrize("family", FAMILIES)
def test_a_line_has_the_score_of_its_mean_and_its_last_token(family: str) -> None:
    """By definition, line by line; and the same whatever is read behind the lines."""
    cache = filled(tiny_model(family), 90)
    held = [np.array(values.astype(mx.float32)) for values in whole_values(cache)]
    assert all(values.shape[1] == 90 for values in held)
    chosen = tuple(range(len(held)))[-2:]
    size = sum(held[number].shape[0] * held[number].shape[2] for number in chosen)
    weights = np.random.default_rng(0).normal(size=2 * size).astype(np.float16)
    lines = np.array([[0, 7], [7, 8], [30, 62]])
    found = LineProbe(chosen, weights.tobytes()).scores(cache, lines)
    expected = []
    for start, end in lines.tolist():
        of_line = [held[number][:, start:end].swapaxes(0, 1).reshape(end - start, -1) for number in chosen]
        values = np.concatenate(of_line, axis=1).astype(np.float64)
        expected.append(float(weights @ np.concatenate([values.mean(axis=0), values[-1]])))
    assert found == pytest.approx(expected, rel=0.02, abs=0.02)
    assert fitting_probe._features([held[n] for n in chosen], lines) @ weights == pytest.approx(
        expected, rel=0.02, abs=0.02
    )


def test_the_fit_finds_the_direction_in_which_lines_differ_from_others_of_their_prompt() -> None:
    rng, read = np.random.default_rng(1), []
    wanted = rng.normal(size=300)
    for _ in range(40):
        asks = np.arange(20) == rng.integers(20)
        prompt = 5 * rng.normal(size=300)  # what all lines of it have says nothing
        features = (rng.normal(size=(20, 300)) + prompt + np.outer(asks, wanted)).astype(np.float32)
        read.append((features, asks))
    found = fitting_probe.fitted(read[:30])
    assert all(np.argmax(features @ found) == np.flatnonzero(asks)[0] for features, asks in read[30:])


def test_a_draft_is_fitted_on_the_layers_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, told = load_pair(str(DEMO)), list[tuple[int, int]]()
    monkeypatch.setattr(fitting_probe, "_FEWEST", 3)
    found = fitting_probe.fit_probe(first_layers(pair.target, 1), pair.tokenizer, 0.0, lambda *done: told.append(done))
    assert found is not None
    assert found.caches == (0,)
    values = next(whole_values(filled(pair.target, 9)))
    assert len(found.weights) == 2 * 2 * values.shape[0] * values.shape[2]
    assert told == [(1, 64), (2, 64), (3, 64)]


def test_a_python_without_sources_has_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sources", "docstrings"):
        monkeypatch.setattr(asking_texts, name, lambda: ())
    assert [prompt.order for prompt in asking_texts.asking_prompts()] != []


@pytest.mark.parametrize(
    ("said", "fits"),
    [("{% if m.role != 'system' %}{{ m.content }}{% endif %}", True), ("{{ raise_exception('no') }}", False)],
)
def test_a_template_may_take_no_system_message_or_nothing(said: str, fits: bool) -> None:
    pair = load_pair(str(DEMO))
    pair.tokenizer.chat_template = "{% for m in messages %}" + said + "{% endfor %}"
    found = fitting_probe.fit_probe(first_layers(pair.target, 1), pair.tokenizer, 0.0)
    assert (found is not None) is fits


def test_that_no_probe_can_be_fitted_is_stored(tmp_path: Path) -> None:
    heads = DraftHeads((Head(1, 3, 0.5),), 2, 3, {"copy": 1.0}, None)
    file = tmp_path / "heads.json"
    file.write_text(json.dumps(heads.to_dict()), encoding="utf-8")
    assert finding_heads._stored_heads(file) == heads
    file.write_text(json.dumps({n: value for n, value in heads.to_dict().items() if n != "probe"}), encoding="utf-8")
    assert finding_heads._stored_heads(file) is None  # of a version that fitted none


def test_a_probe_is_stored_with_its_heads() -> None:
    probe = LineProbe((1, 2), np.arange(8, dtype=np.float16).tobytes())
    heads = DraftHeads((Head(1, 3, 0.5),), 2, 3, {"copy": 1.0}, probe)
    assert DraftHeads.from_dict(heads.to_dict()) == heads
    for broken in ({"caches": [1]}, {"caches": [], "weights": ""}, {"caches": [1], "weights": "AH4="}):
        with pytest.raises(ValueError, match="no calibrated heads"):
            DraftHeads.from_dict(heads.to_dict() | {"probe": broken})
