"""Answers under a grammar, seeds and minimum lengths, through the engine: alone and beside other rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_specprefill import (
    Constraint,
    Engine,
    EngineConfig,
    Failed,
    GenerationRequest,
    InvalidRequestError,
    SamplingParams,
    TokenEvent,
    make_pair,
)
from tests.server.fakes import byte_tokenizer
from tests.support.tiny import generated, tiny_model

TOKENIZER = byte_tokenizer()
COLUMNS = len(TOKENIZER) + 9  # more than the tokenizer has tokens
STOP = frozenset(TOKENIZER.eos_token_ids)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model = tiny_model("llama", seed=3, vocab_size=COLUMNS)
    config = {"max_position_embeddings": 4096, "vocab_size": COLUMNS}
    with Engine(make_pair(model, TOKENIZER, config), EngineConfig(max_rows=16)) as running:
        yield running


def request(text: str = "hello", seed: int | None = None, **fields: Any) -> GenerationRequest:
    sampling = SamplingParams() if seed is None else SamplingParams(temperature=1.0, seed=seed)
    fields = {"max_tokens": 40, "sampling": sampling, "stop_token_ids": STOP} | fields
    return GenerationRequest(tuple(TOKENIZER.encode(text)), **fields)


def by_schema(schema: Any) -> Constraint:
    compact = {"x-guidance": {"whitespace_flexible": False}} | schema
    return Constraint("start: %json " + json.dumps(compact))


def answer(engine: Engine, request: GenerationRequest) -> tuple[str, str]:
    """Its text without the stop token, and why it ended."""
    tokens, last = generated(engine.generate(request))
    return TOKENIZER.decode([token for token in tokens if token not in STOP]), last.reason


def all_at_once(engine: Engine, requests: list[GenerationRequest]) -> list[list[int]]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return [tokens for tokens, _ in pool.map(lambda one: generated(engine.generate(one)), requests)]


# --- grammars --------------------------------------------------------------------------------------------------------

SCALARS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(
        lambda a, n: {"type": "integer", "minimum": a, "maximum": a + n}, st.integers(-99, 99), st.integers(0, 9)
    ),
    st.builds(
        lambda a, n: {"type": "string", "minLength": a, "maxLength": a + n}, st.integers(0, 2), st.integers(0, 3)
    ),
    st.builds(lambda values: {"enum": values}, st.lists(st.text(max_size=4) | st.integers(-5, 5), min_size=1)),
    st.builds(lambda value: {"const": value}, st.dictionaries(st.text("ab", max_size=2), st.booleans(), max_size=2)),
    st.sampled_from([{"type": "string", "pattern": "^[a-c]{2,4}$"}, {"type": "string", "format": "date"}]),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
)


def _object(properties: dict[str, Any], required: int) -> dict[str, Any]:
    names = list(properties)[:required]
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(lambda item, n: {"type": "array", "items": item, "maxItems": n}, inner, st.integers(0, 2)),
        st.builds(_object, st.dictionaries(st.text(min_size=1, max_size=3), inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=4,
)


@pytest.mark.extended
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_random_schemas_are_met(engine: Engine, schema: dict[str, Any], seed: int) -> None:
    text, reason = answer(engine, request(seed=seed, constraint=by_schema(schema), max_tokens=400))
    assert reason == "stop"
    jsonschema.validate(json.loads(text), schema)


def constrained(seed: int) -> GenerationRequest:
    schema = {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": -9}, "minItems": 2, "maxItems": 4}
    return request(f"list {seed}", seed, constraint=by_schema(schema), max_tokens=60)


@pytest.mark.extended
def test_constrained_and_free_rows_do_not_disturb_each_other(engine: Engine) -> None:
    requests = [constrained(seed) for seed in range(4)]
    requests += [request(f"free {seed}", seed, logprobs=2) for seed in range(3)] + [request("greedy"), request("other")]
    requests += [request("greedy and constrained", constraint=Constraint("start: /[a-f0-9]{12}/"))]
    alone = [generated(engine.generate(one))[0] for one in requests]
    assert all_at_once(engine, requests) == alone
    for tokens in alone[:4]:
        assert 2 <= len(json.loads(TOKENIZER.decode(tokens[:-1]))) <= 4


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    """A constraint changes what is chosen, not what is reported about it."""
    free = next(e for e in engine.generate(request(logprobs=1)) if isinstance(e, TokenEvent))
    forced = Constraint(f"start: <[{(free.token + 1) % 256}]>")
    bound = next(e for e in engine.generate(request(logprobs=1, constraint=forced)) if isinstance(e, TokenEvent))
    assert bound.token != free.token
    assert bound.top_logprobs == free.top_logprobs
    assert bound.logprob is not None
    assert free.logprob is not None
    assert bound.logprob < free.logprob


def test_a_bias_can_not_leave_the_grammar(engine: Engine) -> None:
    (y,) = TOKENIZER.encode("y")
    biased = SamplingParams(logit_bias={y: 100.0}, repetition_penalty=1.5, presence_penalty=1.0)
    text, reason = answer(engine, request(sampling=biased, constraint=Constraint("start: /[ab]{3}y?/")))
    assert reason == "stop"
    assert text.strip("ab") == "y"


def test_free_until_the_trigger(engine: Engine) -> None:
    """Whatever the model says before; the trigger is what it says anyhow."""
    free, _ = generated(engine.generate(request()))
    trigger = tuple(free[3:5])
    bound, _ = generated(engine.generate(request(constraint=Constraint('start: "no"', starts_after=trigger))))
    cut = next(i for i in range(len(free)) if tuple(free[i : i + 2]) == trigger) + 2
    assert bound[:cut] == free[:cut]
    assert TOKENIZER.decode(bound[cut:-1]) == "no"
    assert bound[-1] in STOP


def test_a_grammar_that_gets_too_complex_ends_its_own_row_only(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the client's, so the log has no traceback of it."""
    caplog.set_level("INFO")
    grammar = Constraint("start: /a{1,100000}{1,100000}/")
    hopeless = request(constraint=grammar, max_tokens=2000, min_tokens=1999)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(generated, engine.generate(request("other")))
        events = list(engine.generate(hopeless))
        assert other.result()[0] == generated(engine.generate(request("other")))[0]
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, InvalidRequestError)
    assert [record for record in caplog.records if "too complex" in record.message or "a row failed" in record.message]
    assert not [record for record in caplog.records if record.exc_info]
    assert answer(engine, request(constraint=Constraint('start: "ok"'))) == ("ok", "stop")


@pytest.mark.parametrize("grammar", ['start: "a" start', "start: missing"])
def test_endless_and_broken_grammars(engine: Engine, grammar: str) -> None:
    endless = request(constraint=Constraint(grammar, field="guided_grammar"), max_tokens=9)
    if "missing" in grammar:
        with pytest.raises(InvalidRequestError, match="guided_grammar"):
            engine.check(endless)
    else:
        assert answer(engine, endless) == ("a" * 9, "length")


# --- minimum length --------------------------------------------------------------------------------------------------


def test_min_tokens(engine: Engine) -> None:
    """Stop ids that the model would choose at once are held back, then come."""
    wanted = generated(engine.generate(request(stop_token_ids=frozenset())))[0]
    stop = frozenset({wanted[0]})
    assert len(generated(engine.generate(request(stop_token_ids=stop)))[0]) == 1
    held, _ = generated(engine.generate(request(stop_token_ids=stop, min_tokens=5)))
    assert stop.isdisjoint(held[:5])
    for least in (-1, 41):
        with pytest.raises(InvalidRequestError, match="min_tokens"):
            engine.check(request(min_tokens=least))


# --- seeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.extended
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**40),
    others=st.lists(st.tuples(st.integers(1, 30), st.none() | st.integers(0, 9)), min_size=1, max_size=6),
)
def test_a_seed_means_one_text_whatever_joins_or_leaves(
    engine: Engine, seed: int, others: list[tuple[int, int | None]]
) -> None:
    """Beside rows of other lengths, seeded or not, which begin and end while it runs."""
    asked = request("the seeded one", seed, max_tokens=30, stop_token_ids=frozenset())
    alone, _ = generated(engine.generate(asked))
    rows = [request(f"row {i}", other or 0, max_tokens=length) for i, (length, other) in enumerate(others)]
    assert all_at_once(engine, [*rows, asked, *rows])[len(rows)] == alone


def test_different_seeds_differ(engine: Engine) -> None:
    texts = {tuple(generated(engine.generate(request("x", seed)))[0]) for seed in range(4)}
    assert len(texts) == 4
