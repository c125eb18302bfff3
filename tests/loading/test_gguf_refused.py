"""Files that can't be loaded: truncated, corrupted, hostile, or of a kind that is not supported. One line each."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc

import numpy as np
import pytest
from jinja2 import TemplateError

from mlx_specprefill import LoadError, load_pair
from mlx_specprefill.loading.gguf.header import read_header
from mlx_specprefill.loading.gguf.tokens import build_tokenizer
from tests.support.gguf_files import CONFIGS, F32, UNUSED, VOCAB, contents, random_weights, tiny

TEXT, ARRAY, U8, U32 = 8, 9, 0, 4


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def tensor(name="x", shape=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def raw(*parts, entries=0, tensors=0, version=3, data=b"\0" * 4096):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + b"".join(parts) + data


def array(kind, count, values=b""):
    return struct.pack("<IQ", kind, count) + values


HEADERS = {
    "empty": (b"", "is cut off"),
    "another format": (b"PK\3\4" + b"\0" * 100, "not a GGUF file"),
    "version 1": (raw(version=1), "version 1 is not supported"),
    "big-endian": (raw(version=3 << 24), "not supported, only 2 and 3 .little-endian"),
    "a billion tensors": (raw(tensors=10**9), "tensor '' has the shape .., which F32 can't have"),
    "as many entries as can be": (raw(entries=2**64 - 1), "'' twice"),
    "a key without end": (raw(struct.pack("<Q", 2**63), entries=1), "cut off .in a metadata key"),
    "a text without end": (raw(entry("a", TEXT, struct.pack("<Q", 2**63)), entries=1), "cut off .in 'a'"),
    "numbers without end": (raw(entry("a", ARRAY, array(U8, 2**60)), entries=1), "cut off .in 'a'"),
    "numbers beyond the end": (raw(entry("a", ARRAY, array(U32, 10**6)), entries=1), "cut off .in 'a'"),
    "texts without end": (raw(entry("a", ARRAY, array(TEXT, 2**40)), entries=1), "cut off .in 'a'"),
    "texts beyond the end": (raw(entry("a", ARRAY, array(TEXT, 10**6)), entries=1), "cut off .in 'a'"),
    "arrays in arrays": (raw(entry("a", ARRAY, array(ARRAY, 1)), entries=1), "array of the unsupported type 9"),
    "an unknown type of value": (raw(entry("a", 99, b""), entries=1), "'a' has the unknown type 99"),
    "a key twice": (raw(entry("a", U8, b"1") * 2, entries=2), "'a' twice"),
    "no UTF-8": (raw(entry("a", TEXT, text(b"\xff\xfe")), entries=1), "'a' is not UTF-8"),
    "lines in a key": (raw(entry("a\nb", 99, b""), entries=1), r"'a\\nb' has the unknown type"),
    "no dimension": (raw(tensor(shape=()), tensors=1), "has the shape"),
    "a billion dimensions": (raw(text("x") + struct.pack("<I", 10**9), tensors=1), "cut off .in tensor 'x'"),
    "nothing": (raw(tensor(shape=(0,)), tensors=1), "has the shape"),
    "part of a block": (raw(tensor(shape=(31,), kind=8), tensors=1), "which Q8_0 can't have"),
    "a size that overflows": (raw(tensor(shape=(2**32, 2**32)), tensors=1), "behind the end of the file"),
    "an offset that overflows": (raw(tensor(offset=2**64 - 64), tensors=1), "behind the end of the file"),
    "an unknown type of tensor": (raw(tensor(kind=99), tensors=1), "tensor 'x' has the unknown type 99"),
    "a type without values": (raw(tensor(shape=(256,), kind=15), tensors=1), "has the type Q8_K, which can't be read"),
    "a tensor twice": (raw(tensor(), tensor(offset=128), tensors=2), "two tensors of one name"),
    "tensors in one place": (raw(tensor(), tensor("y", offset=64), tensors=2), "tensor 'y' overlaps another"),
    "no alignment": (raw(entry("general.alignment", U32, struct.pack("<I", 0)), entries=1), "general.alignment is 0"),
    "an odd alignment": (raw(entry("general.alignment", TEXT, text("x")), entries=1), "general.alignment is 'x'"),
}


@pytest.mark.parametrize(("data", "message"), HEADERS.values(), ids=HEADERS)
def test_headers_that_lie_cost_nothing(tmp_path, data, message):
    file = tmp_path / "bad.gguf"
    file.write_bytes(data)
    tracemalloc.start()
    begun = time.monotonic()
    try:
        with pytest.raises(LoadError, match=message) as caught:
            load_pair(file)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert time.monotonic() - begun < 20  # a loop over what is claimed would take days
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_header_may_not_be_as_large_as_the_file(tmp_path):
    """A sparse file has any size for nothing."""
    file = tmp_path / "bad.gguf"
    with file.open("wb") as sparse:
        sparse.write(raw(entry("a", TEXT, struct.pack("<Q", 1 << 33)), entries=1))
        sparse.truncate(1 << 34)
    with pytest.raises(LoadError, match="its header is larger than 64 MiB"):
        read_header(file)


def test_missing_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(LoadError, match=r"nowhere\.gguf: No such file or directory$"):
        load_pair(tmp_path / "nowhere.gguf")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(LoadError, match=r"folder\.gguf"):
        load_pair(tmp_path / "folder.gguf")


def test_every_truncation_is_one_line(tmp_path):
    data = tiny("llama", num_hidden_layers=1).write(tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "cut.gguf"
    for length in [*range(0, 4000, 97), *range(4000, len(data), 6007), len(data) - 33]:
        file.write_bytes(data[:length])
        with pytest.raises(LoadError, match=r"cut off|behind the end"):
            load_pair(file)


def test_damaged_files_load_or_are_refused(tmp_path):
    """Random damage to header and metadata: nothing but a LoadError of one line comes out."""
    data = tiny("llama", num_hidden_layers=1).write(tmp_path / "whole.gguf").read_bytes()
    file, rng, header = tmp_path / "damaged.gguf", random.Random(5), data.rfind(b"weight") + 40
    values = [b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 2**63), struct.pack("<Q", 10**9), struct.pack("<II", 9, 8)]
    refused = 0
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            place, value = rng.randrange(header), rng.choice([*values, rng.randbytes(1)])
            damaged[place : place + len(value)] = value
        file.write_bytes(damaged)
        if (message := refusal(file)) is not None:
            refused += 1
            assert "\n" not in message
    assert refused > 50


def refusal(file):
    try:
        load_pair(file)
    except LoadError as error:
        return str(error)
    return None


def changed(**metadata):
    """A sound file but for these; a key is written `a__b` for `a.b`, None leaves it out."""
    made = tiny("llama", num_hidden_layers=1)
    for name, value in metadata.items():
        key = name.replace("__", ".")
        made.metadata.pop(key, None)
        if value is not None:
            made.metadata[key] = value
    return made


GGML = "tokenizer__ggml__"
TOKENS = [f"t{index}" for index in range(VOCAB)]
METADATA = {
    "layers without end": ({"llama__block_count": 10**9}, "block_count is 1000000000, but it has"),
    "no layers": ({"llama__block_count": 0}, "block_count is 0"),
    "a missing setting": ({"llama__block_count": None}, "block_count is None"),
    "a setting of another type": ({"llama__block_count": "3"}, "block_count is '3'"),
    "no heads": ({"llama__attention__head_count": 0}, "head_count is 0"),
    "heads that don't fit": ({"llama__attention__head_count": 8}, r"blk\.0\.attn_\w+\.weight has the shape"),
    "a width that overflows": ({"llama__embedding_length": 2**32 - 1}, "embedding_length is 4294967295"),
    "another width": ({"llama__embedding_length": 128}, "token_embd.weight has the shape"),
    "another inner width": ({"llama__feed_forward_length": 2**31 - 1}, r"blk\.0\.ffn_\w+\.weight has the shape"),
    "a strange epsilon": ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
    "half of a head rotated": ({"llama__rope__dimension_count": 8}, "dimension_count is 8, but only 16"),
    "an unknown scaling": (
        {"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 2.0},
        "scaling.type is 'longrope'",
    ),
    "an adapter": ({"general__type": "adapter"}, "holds no model .general.type is 'adapter'"),
    "one of several parts": ({"split__count": 3}, "one of 3 parts"),
    "an unknown tokenizer": ({f"{GGML}model": "bert"}, "tokenizer.ggml.model is 'bert'"),
    "an unknown pre-tokenizer": ({f"{GGML}pre": "tekken\n"}, r"pre-tokenizer 'tekken\\n' is not supported"),
    "no tokens": ({f"{GGML}tokens": None}, "0 tokens"),
    "tokens that are numbers": ({f"{GGML}tokens": [1, 2]}, "tokens is no list of str"),
    "more tokens than rows": ({f"{GGML}tokens": [*TOKENS, "more"]}, f"{VOCAB + 1} tokens for an embedding of {VOCAB}"),
    "a token twice": ({f"{GGML}tokens": [*TOKENS[1:], "t1"]}, "a token twice"),
    "a token without end": ({f"{GGML}tokens": [*TOKENS[1:], "x" * 5000]}, "more than 1024 characters"),
    "types for other tokens": ({f"{GGML}token_type": [1, 2]}, "different number"),
    "a merge of nothing": ({f"{GGML}merges": ["ab"]}, "its merge 'ab'"),
    "a merge to nothing": ({f"{GGML}merges": ["a b"]}, "its merge 'a b'"),
    "a role for no token": ({f"{GGML}eos_token_id": VOCAB}, f"eos_token_id is {VOCAB}"),
    "a template that is no text": ({"tokenizer__chat_template": 7}, "chat_template is not text"),
    "SentencePiece without end": (
        {f"{GGML}model": "llama", f"{GGML}scores": [0.0] * VOCAB, f"{GGML}tokens": [*TOKENS[1:], "a" * 300]},
        "a token of 300 characters",
    ),
    "SentencePiece without scores": ({f"{GGML}model": "llama"}, "its vocabulary has no scores"),
}


@pytest.mark.parametrize(("metadata", "message"), METADATA.values(), ids=METADATA)
def test_metadata_that_cannot_be_is_named(tmp_path, metadata, message):
    file = changed(**metadata).write(tmp_path / "bad.gguf")
    with pytest.raises(LoadError, match=message) as caught:
        load_pair(file)
    assert "\n" not in str(caught.value)


def test_merges_are_not_derived_from_endless_vocabularies():
    """Every way to cut a token in two is tried, and one of a^n has n - 1 that count."""
    tokens = [letter * length for letter in map(chr, range(0x4E00, 0x4E00 + 200)) for length in range(1, 257)]
    metadata = {"tokens": tokens, "scores": [0.0] * len(tokens), "model": "llama"}
    with pytest.raises(LoadError, match=r"its vocabulary of 6579200 characters is too large"):
        build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, "llama", 10**6, 512)


def test_an_unknown_architecture_is_named(tmp_path):
    made = tiny("llama", num_hidden_layers=1)
    made.architecture = "mamba"
    with pytest.raises(LoadError, match="architecture 'mamba' is not supported, only llama, qwen2, qwen3, gemma3"):
        load_pair(made.write(tmp_path / "bad.gguf"))


def test_tensors_that_do_not_make_the_model_are_named(tmp_path):
    made = tiny("llama", num_hidden_layers=2)
    kept = made.tensors.pop("blk.1.ffn_up.weight")
    with pytest.raises(LoadError, match=r"it has no tensor blk\.1\.ffn_up\.weight"):
        load_pair(made.write(tmp_path / "missing.gguf"))
    made.tensors["blk.1.ffn_up.weight"] = np.zeros((8, 64), np.float32), F32
    with pytest.raises(LoadError, match=r"blk\.1\.ffn_up\.weight has the shape \(8, 64\), but \(96, 64\) is needed"):
        load_pair(made.write(tmp_path / "shape.gguf"))
    made.tensors |= {"blk.1.ffn_up.weight": kept, "blk.0.ffn_gate_exps.weight": kept}
    with pytest.raises(LoadError, match=r"tensor 'blk\.0\.ffn_gate_exps\.weight' is no part"):
        load_pair(made.write(tmp_path / "experts.gguf"))


def test_gemma_needs_one_round_of_layers(tmp_path):
    with pytest.raises(LoadError, match="block_count is 5, less than one round of 6"):
        load_pair(tiny("gemma3", num_hidden_layers=5).write(tmp_path / "bad.gguf"))


def test_padding_of_the_vocabulary_is_no_token(tmp_path):
    config = {**CONFIGS["llama"], "vocab_size": VOCAB + 3}
    made = contents("llama", config, random_weights(config))
    made.metadata["tokenizer.ggml.tokens"] += [f"[PAD{VOCAB + index}]" for index in range(3)]
    made.metadata["tokenizer.ggml.token_type"] += [UNUSED] * 3
    pair = load_pair(made.write(tmp_path / "padded.gguf"))
    assert (len(pair.tokenizer.get_vocab()), pair.vocab_size) == (VOCAB, VOCAB + 3)


ATTACKS = [
    "{{ cycler.__init__.__globals__.os.system('touch ' ~ messages[0].content) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{{ c.__init__.__globals__ }}{% endfor %}",
    "{{ self.__init__.__globals__.__builtins__.open(messages[0].content, 'w') }}",
    "{{ lipsum.__globals__['os'].popen('touch ' ~ messages[0].content).read() }}",
    "{% set x = messages.append(1) %}",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_template_runs_no_code(tmp_path, attack):
    touched = tmp_path / "touched"
    pair = load_pair(changed(tokenizer__chat_template=attack).write(tmp_path / "hostile.gguf"))
    with pytest.raises(TemplateError):
        pair.tokenizer.apply_chat_template([{"role": "user", "content": str(touched)}], tokenize=False)
    assert not touched.exists()
