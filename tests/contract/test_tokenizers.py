"""Our uses of the package tokenizers, in the one place that calls it."""

from __future__ import annotations

from pathlib import Path

import mlx_specprefill
import mlx_specprefill_server
from mlx_specprefill.adapters.tokens.backend import encode_text
from tests.support.tokenizers_of_all_kinds import kind


def test_ids_and_the_characters_of_each_token() -> None:
    backend = kind("llama 2").backend_tokenizer
    ids, offsets = encode_text(backend, "the code 🎂")
    assert [backend.id_to_token(token) for token in ids[-4:]] == ["<0xF0>", "<0x9F>", "<0x8E>", "<0x82>"]
    assert offsets[-1] == (9, 10)
    assert len(ids) == len(offsets)
    assert encode_text(backend, "the code 🎂", around=True)[0] == [1, *ids]


def test_nothing_else_calls_the_packages_encode() -> None:
    packages = (Path(str(package.__file__)).parent for package in (mlx_specprefill, mlx_specprefill_server))
    callers = {
        path.name
        for package in packages
        for path in package.rglob("*.py")
        if "backend.encode(" in (text := path.read_text(encoding="utf-8")) or "names().encode(" in text
    }
    assert callers == {"backend.py"}
