from __future__ import annotations

from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_specprefill.cache.prefix.identity import block_digest, model_identity, token_bytes
from mlx_specprefill.cache.prefix.nodes import make_root
from mlx_specprefill.request import SHARED
from tests.support.tiny import CONFIGS, tiny_model


def test_one_checkpoint_has_one_identity() -> None:
    one = model_identity(tiny_model("llama", 3), {**CONFIGS["llama"], "_name_or_path": "here"})
    other = model_identity(tiny_model("llama", 3), {**CONFIGS["llama"], "_name_or_path": "there"})
    assert one == other


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "nemotron_h", "gpt_oss"])
def test_weights_dtype_quantisation_and_configuration_enter_it(family: str) -> None:
    config = CONFIGS[family]
    base = tiny_model(family)
    half = tiny_model(family)
    half.set_dtype(mx.float16)
    quantised = tiny_model(family)
    nn.quantize(quantised, 32, 4, class_predicate=_can_be_quantised)
    identities = {
        model_identity(base, config),
        model_identity(base, {**config, "rope_theta": 2000.0}),
        model_identity(tiny_model(family, seed=1), config),
        model_identity(half, config),
        model_identity(quantised, config),
    }
    assert len(identities) == 5


def _can_be_quantised(_: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.weight.shape[-1] % 32 == 0


def test_one_changed_matrix_enters_it() -> None:
    model = tiny_model("llama")
    before = model_identity(model, {})
    model.layers[1].mlp.up_proj.weight = model.layers[1].mlp.up_proj.weight * 1.01
    assert model_identity(model, {}) != before


def test_the_mlx_lm_minor_version_enters_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    identities = []
    for version in ("0.32.2", "0.32.9", "0.33.0"):
        monkeypatch.setattr("mlx_specprefill.cache.prefix.identity.version", lambda _, version=version: version)
        identities.append(model_identity(model, {}))
    assert identities[0] == identities[1] != identities[2]


def chain_of(parent: bytes, tokens: list[int], block_size: int) -> list[bytes]:
    starts = range(0, len(tokens), block_size)
    return list(accumulate((tokens[i : i + block_size] for i in starts), block_digest, initial=parent))[1:]


def test_a_digest_covers_everything_before_it() -> None:
    root = make_root("model", 4, SHARED).digest
    tokens = list(range(14))
    chain = chain_of(root, tokens, 4)
    assert len(chain) == 4
    assert len(set(chain)) == 4
    for changed in range(14):
        other = chain_of(root, [*tokens[:changed], 99, *tokens[changed + 1 :]], 4)
        assert [a == b for a, b in zip(chain, other, strict=True)] == [block < changed // 4 for block in range(4)]
    assert chain_of(root, tokens[:8], 4) == chain[:2]


def test_roots_tell_identities_and_block_sizes_apart() -> None:
    roots = [make_root(*made, SHARED).digest for made in (("a", 4), ("b", 4), ("a", 8), ("a:4", 4))]
    assert len(set(roots)) == 4


def test_token_bytes_are_the_same_for_every_integer_type() -> None:
    assert token_bytes([1, 300, 70000]) == token_bytes(np.array([1, 300, 70000], dtype=np.int64))
    assert block_digest(b"", (1, 2)) == block_digest(b"", np.array([1, 2], dtype=np.int32))
