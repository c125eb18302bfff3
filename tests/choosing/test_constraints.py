"""Grammars against brute force over a small vocabulary, and what is refused."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_specprefill import Constraint, InvalidRequestError
from mlx_specprefill.choosing.constraints import Grammars, GrammarState
from tests.server.fakes import byte_tokenizer
from tests.support.tiny import tokenizer

WORDS = ["".join(letters) for length in (1, 2, 3) for letters in itertools.product("ab", repeat=length)] + ["c"]
EOS, MARK = len(WORDS), len(WORDS) + 1
COLUMNS = len(WORDS) + 7  # a model's logits often have more columns than its tokenizer has tokens


def words_tokenizer() -> TokenizerWrapper:
    """Every text of up to three letters "a" and "b" is one token: many ways to write the same text."""
    inner = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(WORDS)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    fast.add_special_tokens({"additional_special_tokens": ["<mark>"]})
    return TokenizerWrapper(fast)


GRAMMARS = Grammars(words_tokenizer(), frozenset({EOS}))


def state(grammar: str, stops: frozenset[int] = frozenset({EOS}), min_tokens: int = 0, **fields: Any) -> GrammarState:
    return GRAMMARS.state(Constraint(grammar, **fields), stops, min_tokens)


def allowed(state: GrammarState) -> set[int]:
    mask = state.mask(COLUMNS)
    assert mask.shape == (COLUMNS,)
    return set(mask.nonzero()[0].tolist())


def lark(language: set[str]) -> str:
    return "start: " + " | ".join(json.dumps(text) for text in sorted(language))


# --- masks -----------------------------------------------------------------------------------------------------------


def brute_force(language: set[str], text: str) -> set[int]:
    """Tokens after which some text of the language can still be completed."""
    going_on = {i for i, word in enumerate(WORDS) if any(full.startswith(text + word) for full in language)}
    return going_on | ({EOS} if text in language else set())


@settings(max_examples=60)
@given(language=st.sets(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=6), data=st.data())
def test_every_token_that_the_language_allows_and_no_other(language: set[str], data: st.DataObject) -> None:
    way, text = state(lark(language)), ""
    while True:
        expected = brute_force(language, text)
        assert allowed(way) == expected
        token = data.draw(st.sampled_from(sorted(expected)))
        way.accept(token)
        if token == EOS:
            assert allowed(way) == {EOS}
            return
        text += WORDS[token]


@settings(max_examples=30)
@given(low=st.integers(0, 3), more=st.integers(0, 3), data=st.data())
def test_a_regex_allows_what_its_enumeration_allows(low: int, more: int, data: st.DataObject) -> None:
    language = {"a" * n + end for n in range(low, low + more + 1) for end in ("b", "ca")}
    way, text = state(f"start: /a{{{low},{low + more}}}(b|ca)/"), ""
    for _ in range(12):
        assert allowed(way) == brute_force(language, text)
        token = data.draw(st.sampled_from(sorted(brute_force(language, text))))
        way.accept(token)
        if token == EOS:
            return
        text += WORDS[token]


def test_text_that_spells_a_special_token_is_not_that_token() -> None:
    """A tokenizer would split the forced text "<s>" into its special token, which is not text."""
    hf = byte_tokenizer()
    grammars = Grammars(hf, frozenset({hf.eos_token_id}))
    for text in ("<s>", "x<think>y"):
        way = grammars.state(Constraint(f"start: {json.dumps(text)}"), frozenset({hf.eos_token_id}))
        for byte in text.encode():
            (char,) = hf.encode(chr(byte), add_special_tokens=False)
            mask = way.mask(300)
            assert mask.nonzero()[0].tolist() == [char]
            way.accept(char)


def test_a_special_token_is_allowed_where_the_grammar_names_it() -> None:
    way = state('start: "a" <mark> "b"')
    way.accept(WORDS.index("a"))
    assert allowed(way) == {MARK}
    way.accept(MARK)
    assert allowed(way) == {WORDS.index("b")}


# --- ends ------------------------------------------------------------------------------------------------------------


def test_only_stop_ids_end_the_text() -> None:
    """The request's own stop ids, not the tokenizer's end of text."""
    way = state('start: "a"', stops=frozenset({MARK}))
    way.accept(WORDS.index("a"))
    assert allowed(way) == {MARK}
    way.accept(MARK)
    assert allowed(way) == {MARK}


def test_without_stop_ids_the_end_of_text_remains() -> None:
    way = state('start: "a"', stops=frozenset())
    for token in (WORDS.index("a"), EOS, EOS):
        way.accept(token)
        assert allowed(way) == {EOS}


def test_min_tokens_holds_the_end_back_while_the_text_can_go_on() -> None:
    way = state('start: "a"{1,3}', min_tokens=2)
    a = WORDS.index("a")
    way.accept(a)
    assert EOS not in allowed(way)
    way.accept(a)
    assert EOS in allowed(way)
    short = state('start: "a"', min_tokens=9)
    short.accept(a)
    assert allowed(short) == {EOS}


def test_nothing_is_masked_before_the_trigger() -> None:
    way = state('start: "b"', starts_after=(MARK, WORDS.index("c")))
    for token in (MARK, WORDS.index("a"), MARK, MARK):
        assert way.mask(COLUMNS) is None
        way.accept(token)
    assert way.mask(COLUMNS) is None
    way.accept(WORDS.index("c"))
    assert allowed(way) == {WORDS.index("b")}


def test_two_answers_do_not_share_their_state() -> None:
    one, other = state('start: "ab" "c"'), state('start: "ab" "c"')
    one.accept(WORDS.index("ab"))
    assert allowed(one) == {WORDS.index("c")}
    assert allowed(other) == {WORDS.index("a"), WORDS.index("ab")}


# --- refusals --------------------------------------------------------------------------------------------------------


def schema(value: Any) -> str:
    return f"start: %json {json.dumps(value)}"


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (schema({"type": "object", "not": {}}), "not"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema({"type": "string", "format": "color"}), "color"),
        (schema({"$ref": "http://example.com/a"}), "example.com"),
        (schema({"type": "str"}), "str"),
        (schema(False), "false"),
        (schema({"type": "integer", "minimum": 2, "maximum": 1}), "minimum"),
        ("{not json", "key must be"),
        ("", "no start rule"),
        ("start: /(/", "unclosed"),
        ("start: other", "other"),
        ("start: start", "no text satisfies"),
        ('start: "z"', "no text satisfies"),
        ("start: " + '"a" | ' * 200_000 + '"b"', "characters"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_said(grammar: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as refused:
        GRAMMARS.check(Constraint(grammar, field="tools[0]"))
    assert refused.value.field == "tools[0]"
    assert str(refused.value).startswith("tools[0]: ")
    assert len(str(refused.value)) < 600


BOMBS = {
    "repetition": "start: /a{1,100000}{1,100000}/",
    "doubling rules": "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40: "a"',
    "doubling terminals": "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"',
    "ambiguity": 'start: start start start | /[abc]/ | ""',
    "optional properties": schema({"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}),
    "nesting": "start: %json " + '{"items":' * 5000 + "{}" + "}" * 5000,
    "branches": schema({"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(4)]} for i in range(12)]}),
    "intersection": "start: A\n" + "A: " + " & ".join(f"/.*{c}.{{{n}}}/" for c, n in [("a", 90), ("b", 91), ("c", 92)]),
    "endless recursion": 'start: "a" start',
    "endless string": schema({"type": "string", "maxLength": 10**9}),
    "long array": schema({"type": "array", "minItems": 10**6}),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", BOMBS)
def test_no_grammar_takes_long(name: str) -> None:
    """Refused when compiled or on the way, or followed: each step in little CPU time."""
    begun = time.process_time()
    try:
        way = state(BOMBS[name])
        for _ in range(200):
            mask = way.mask(COLUMNS)
            way.accept(int(mask.nonzero()[0][-1]))
            assert time.process_time() - begun < 7.5
            begun = time.process_time()
    except InvalidRequestError:
        pass
    assert time.process_time() - begun < 7.5


def test_a_tokenizer_without_bytes_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="tokenizer can't be guided"):
        Grammars(tokenizer(), frozenset({1})).check(Constraint('start: "a"'))
