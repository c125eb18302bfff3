"""A question about everything is read in full, unless the request wants a sparse prefill: through the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    GenerationRequest,
    ModelPair,
    PrefillReport,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    load_pair,
)
from mlx_specprefill.selection.scorer import HeadScorer
from mlx_specprefill_server.prompt.builder import PromptBuilder
from mlx_specprefill_server.prompt.conversation import conversation
from tests.support.tiny import generated

MODELS = Path(__file__).resolve().parents[2] / "models"
CONFIG = EngineConfig(policy=SpecPrefillPolicy(threshold=100, densify=False))
BY_SAVING = SpecPrefillPolicy(
    threshold=None, min_saving_ms=-1e12, min_saving_share=Fraction(-1000), min_kept=0, densify=False
)
TEXT = "The ship left the harbour and met nobody. " * 40
ALL, ONE = "How many ships left?", "Where did the ship meet Emma?"
REASON = 'the question is about the whole prompt ("How many")'


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return load_pair(str(MODELS / "demo/target"), str(MODELS / "demo/draft"))


@pytest.fixture
def engine(pair: ModelPair) -> Iterator[Engine]:
    with Engine(pair, CONFIG) as running:
        yield running


def request(engine: Engine, messages: Sequence[Mapping[str, str]], enabled: bool | None = None) -> GenerationRequest:
    said = conversation([dict(message) for message in messages])
    prompt = asyncio.run(PromptBuilder(engine.pair.tokenizer).chat(said))
    return prompt.request(2, SpecPrefillOptions(enabled))


def asked(engine: Engine, *contents: str, enabled: bool | None = None) -> PrefillReport:
    """Return the report of a conversation between user, assistant and tool, in that order."""
    roles = ("user", "assistant", "tool")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    _, last = generated(engine.generate(request(engine, messages, enabled)))
    return last.report


@pytest.mark.parametrize("message", [f"{TEXT}\n\n{ALL}", f"{ALL}\n\n{TEXT}"])
def test_it_is_read_in_full_before_the_draft_is_asked(
    engine: Engine, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeadScorer, "score", None)
    found = asked(engine, message)
    assert (found.mode, found.reason) == ("full", REASON)
    assert engine.prefiller.fallbacks.total() == 0


def test_other_questions_and_requests_that_want_it_are_sparse(engine: Engine) -> None:
    """Text in the middle of the prompt is no question."""
    assert asked(engine, f"{TEXT}\n\n{ONE}").mode == "sparse"
    assert asked(engine, f"{TEXT}\n\n{ALL}", enabled=True).reason == "requested"
    assert asked(engine, f"{TEXT}\n{ALL}\n{TEXT}\n\n{ONE}").mode == "sparse"


def test_behind_tool_results_the_user_has_asked(engine: Engine) -> None:
    assert asked(engine, ONE, "I will look.", f"{ALL}\n{TEXT}\n{ALL}").mode == "sparse"
    assert asked(engine, ALL, "I will look.", TEXT).reason == REASON


def test_a_short_question_ends_where_its_message_begins(engine: Engine) -> None:
    """The last words of a system message are no question, though they stand just before it."""
    messages = [{"role": "system", "content": f"Be brief. {ALL}"}, {"role": "user", "content": "Why?"}]
    assert request(engine, messages).about_everything is None
    assert request(engine, [*messages, {"role": "user", "content": ALL}]).about_everything == "How many"


def test_a_raw_prompt_is_one_message_whether_as_text_or_as_ids(engine: Engine) -> None:
    prompts = PromptBuilder(engine.pair.tokenizer)
    for text, words in ((f"{TEXT}\n\n{ALL}", "How many"), (f"{ALL}\n\n{TEXT}", "How many"), (TEXT, None)):
        raw = asyncio.run(prompts.raw(text))
        assert raw.about_everything == prompts.ids(raw.tokens.tolist()).about_everything == words


def test_an_inspection_says_the_same(engine: Engine) -> None:
    messages = [{"role": "user", "content": f"{TEXT}\n\n{ALL}"}]
    found = engine.inspect(request(engine, messages))
    assert (found.mode, found.reason) == ("full", REASON)
    assert found.kept_tokens < found.prompt_tokens  # what would be kept is shown all the same
    assert engine.inspect(request(engine, messages, True)).mode == "sparse"


# --- an agent compacts its session -----------------------------------------------------------------------------------

COMPACTIONS = {
    "Claude Code": "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\nYour task is to create a detailed "
    "summary of the conversation so far, paying close attention to the user's requests.\n\nREMINDER: Call no tools.",
    "Codex": "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM that will "
    "resume the task.",
    "opencode": "Provide a detailed prompt for continuing our conversation above. Focus on what we did.",
    "pi": "The messages above are a conversation to summarize. Create a structured context checkpoint.",
    "Qwen-Code": "First, reason in your scratchpad. Then, generate the <state_snapshot>.",
}


def session(engine: Engine, sparse: bool, name: str) -> tuple[list[dict[str, str]], PrefillReport]:
    """Return the messages of a session of one turn, and the report of it."""
    messages = [{"role": "user", "content": f"This is for {name}.\n{TEXT}\n\n{ONE}"}]
    asked = request(engine, messages, None if sparse else False)
    tokens, last = generated(engine.generate(asked))
    answer = engine.pair.tokenizer.decode([token for token in tokens if token not in engine.pair.eos_token_ids])
    return [*messages, {"role": "assistant", "content": answer}], last.report


@pytest.mark.parametrize("client", COMPACTIONS)
def test_a_summary_uses_what_the_session_has(engine: Engine, client: str) -> None:
    for sparse in (True, False):
        messages, before = session(engine, sparse, f"{client} {sparse}")
        asked = request(engine, [*messages, {"role": "user", "content": COMPACTIONS[client]}])
        assert asked.about_session
        _, last = generated(engine.generate(asked))
        found = last.report
        assert (before.mode, found.mode) == (("sparse", "sparse") if sparse else ("full", "full"))
        assert found.cached_tokens >= before.kept_tokens
        absent = before.prompt_tokens - before.kept_tokens
        assert found.prompt_tokens - found.kept_tokens <= absent
        assert ("it has not seen" in found.reason) == sparse
        assert "summarised" in found.reason


@pytest.mark.parametrize("client", COMPACTIONS)
def test_a_summary_of_what_is_not_cached_is_read_in_full(engine: Engine, client: str) -> None:
    turns = [{"role": "user", "content": f"{TEXT}\n\n{client}"}, {"role": "assistant", "content": "It did."}]
    _, last = generated(engine.generate(request(engine, [*turns, {"role": "user", "content": COMPACTIONS[client]}])))
    assert (last.report.mode, last.report.reason) == ("full", "the session is to be summarised")


@pytest.mark.parametrize("client", COMPACTIONS)
def test_the_user_may_have_said_something_before(engine: Engine, client: str) -> None:
    turns = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}]
    message = f"{'Go on with the parser. ' * 400}\n{COMPACTIONS[client]}"
    assert request(engine, [*turns, {"role": "user", "content": message}]).about_session


@pytest.mark.parametrize(
    "message",
    [
        ALL,
        ONE,
        f"{TEXT * 60}\nSummarize the conversation.",
        "Provide a prompt for it.",
        "Give me a summary of the conversation above.",
        "Create a summary of the conversation between Alice and Bob.",
        "Write a summary function for the session table.",
        "Which of these returns 7, as summarize() in conversation.py needs it?",
        "Where does the log say <state_snapshot>?",
    ],
)
def test_other_questions_are_no_compaction(engine: Engine, message: str) -> None:
    turns = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}]
    assert not request(engine, [*turns, {"role": "user", "content": message}]).about_session
    assert not request(engine, [{"role": "user", "content": COMPACTIONS["pi"]}]).about_session


# --- nobody is known to ask for a part -------------------------------------------------------------------------------


@pytest.fixture
def deciding(pair: ModelPair) -> Iterator[Engine]:
    """An engine that decides by the predicted saving, and finds that everything pays."""
    with Engine(pair, EngineConfig(policy=BY_SAVING)) as running:
        yield running


NOBODY = "no line is known to ask for a part of the text"
WHOLE = (
    "Перепиши понятнее: {}",
    "{}\n修改代码",
    "Needs another ending.\n\n{}",
    "{}\n\nmore humor please",
    "You are a poet.\n\n# Steps\n\n- Read the text slowly.\n- Write ten verses.\n- Make them rhyme.\n\n{}",
)
PART = (
    f"{{}}\n\n{ONE}",
    f"{ONE}\n{{}}",
    f"{{}}\n{ONE}\n{{}}\nThanks.",
    "Find the ship that met Emma.\n\n{}",
    "{}\nTell me who met it.",
)


@pytest.mark.parametrize("said", WHOLE)
def test_a_pasted_text_without_a_question_is_read_in_full(deciding: Engine, said: str) -> None:
    message = said.format(TEXT)
    found = asked(deciding, message)
    assert (found.mode, found.reason, found.draft_tokens) == ("full", NOBODY, 0)
    assert deciding.inspect(request(deciding, [{"role": "user", "content": message}])).reason == NOBODY
    assert deciding.prefiller.fallbacks.total() == 0


@pytest.mark.parametrize("said", WHOLE)
def test_so_is_one_behind_a_system_message_or_an_answer_that_says_what_to_do_with_it(
    deciding: Engine, said: str
) -> None:
    standing = said.format("")
    text = {"role": "user", "content": TEXT}
    system = [{"role": "system", "content": standing}, text]
    turns = [{"role": "user", "content": standing}, {"role": "assistant", "content": "Please send it."}, text]
    tools = [*turns[:-1], {"role": "tool", "content": "Found."}, text]
    plans = [deciding.inspect(request(deciding, messages)) for messages in (system, turns, tools)]
    assert [(plan.mode, plan.reason == NOBODY) for plan in plans] == [("full", True), ("full", True), ("sparse", False)]


@pytest.mark.parametrize("said", PART)
def test_a_question_or_an_order_anywhere_asks_for_a_part(deciding: Engine, said: str) -> None:
    assert asked(deciding, said.format(*[TEXT] * said.count("{}"))).mode == "sparse"


@pytest.mark.parametrize("said", [said for said in WHOLE if said.startswith("{}")])
def test_a_text_that_a_question_has_thinned_is_read_anew(deciding: Engine, said: str) -> None:
    thinned = asked(deciding, f"{TEXT}\n\n{ONE}")
    assert thinned.mode == "sparse"
    found = asked(deciding, said.format(TEXT))
    assert (found.mode, found.reason, found.kept_tokens) == ("full", NOBODY, found.prompt_tokens)


def test_who_wants_it_and_agents_need_no_question(deciding: Engine, engine: Engine) -> None:
    message = WHOLE[0].format(TEXT)
    assert asked(deciding, message, enabled=True).mode == "sparse"
    assert asked(engine, message).mode == "sparse"  # above a threshold, as its owner wants it
    assert asked(deciding, "Hello.", "Hello.", TEXT).mode == "sparse"
