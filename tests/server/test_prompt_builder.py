from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import processors

from mlx_specprefill import InvalidRequestError
from mlx_specprefill_server.prompt.builder import PromptBuilder
from mlx_specprefill_server.prompt.conversation import Ending, conversation, ending_of

from .fakes import CHATML, byte_tokenizer
from .templates import MISTRAL, PLAIN

DEMO = Path(__file__).parents[2] / "models" / "demo" / "target"


def with_start_token() -> TokenizerWrapper:
    wrapper = byte_tokenizer()
    wrapper._tokenizer.add_special_tokens({"bos_token": "<bos>"})
    inner = wrapper._tokenizer.backend_tokenizer
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", inner.token_to_id("<bos>"))]
    )
    return wrapper


def test_a_raw_prompt_gets_its_start_token_once() -> None:
    tokenizer = with_start_token()
    builder = PromptBuilder(tokenizer)
    start = tokenizer.bos_token_id
    assert asyncio.run(builder.raw("a")).tokens.tolist() == [start, 64]
    assert asyncio.run(builder.raw("<bos>a")).tokens.tolist() == [start, 64]


def test_a_rendered_prompt_gets_no_start_token_of_the_tokenizers() -> None:
    tokenizer = with_start_token()
    prompt = asyncio.run(PromptBuilder(tokenizer).chat(conversation([{"role": "user", "content": "a"}])))
    assert tokenizer.bos_token_id not in prompt.tokens


def test_the_bundled_tokenizer() -> None:
    tokenizer = load_tokenizer(DEMO)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Die Straße — 你好 🎉\n\nWhat is the secret code for Anna?"},
    ]
    prompt = asyncio.run(PromptBuilder(tokenizer).chat(conversation(messages)))
    assert list(prompt.tokens) == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    contents = [tokenizer.decode(list(prompt.tokens[s.content_start : s.content_end])) for s in prompt.spans]
    assert contents == [message["content"] for message in messages]
    assert [span.kind for span in prompt.spans] == ["system", "user"]


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The environment."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Good."},
]


def rendered(template: str, messages: list[dict[str, Any]], ending: Ending = "answer") -> str:
    return asyncio.run(PromptBuilder(byte_tokenizer(template)).text(conversation(messages, ending=ending)))


def test_neighbours_are_joined_where_the_template_wants_turns() -> None:
    builder = PromptBuilder(byte_tokenizer(MISTRAL))
    prompt = asyncio.run(builder.chat(conversation(TURNS)))
    whole = "<s>[INST] The environment.\n\nHello?[/INST] Yes.</s>[INST] Be brief.\n\nGood.[/INST]"
    assert byte_tokenizer().decode(list(prompt.tokens)) == whole
    assert [span.kind for span in prompt.spans] == ["user", "user", "assistant", "system", "user"]


def test_neighbours_stay_apart_where_the_template_takes_them() -> None:
    assert rendered(CHATML, TURNS).count("<|im_start|>user") == 3


def test_a_system_message_goes_to_the_user_where_the_template_knows_none() -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
    )
    assert rendered(template, TURNS).startswith("USER: Be brief.\n\nThe environment.\nUSER: Hello?\nASSISTANT: Yes.")


def test_what_no_form_helps_is_refused_in_the_templates_words() -> None:
    template = "{{ raise_exception('No word of it.') if 'word' in messages[-1].content }}" + CHATML
    with pytest.raises(InvalidRequestError, match="No word of it") as caught:
        rendered(template, [{"role": "user", "content": "A word"}])
    assert caught.value.field == "messages"


def test_how_a_prompt_ends() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good mor"}]
    assert rendered(CHATML, messages).endswith("Good mor<|im_end|>\n<|im_start|>assistant\n")
    assert rendered(CHATML, messages, "continue").endswith("<|im_start|>assistant\nGood mor")
    assert rendered(CHATML, messages, "none").endswith("Good mor<|im_end|>\n")


def test_the_message_that_goes_on_has_its_span() -> None:
    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good mor"}]
    prompt = asyncio.run(PromptBuilder(tokenizer).chat(conversation(messages, ending="continue")))
    last = prompt.spans[-1]
    assert (last.kind, last.end) == ("assistant", len(prompt.tokens))
    assert tokenizer.decode(list(prompt.tokens[last.content_start : last.content_end])) == "Good mor"


@pytest.mark.parametrize(
    ("add", "go_on", "ending"),
    [
        (None, False, "answer"),
        (True, False, "answer"),
        (False, False, "none"),
        (None, True, "continue"),
        (False, True, "continue"),
    ],
)
def test_vllms_two_fields(add: bool | None, go_on: bool, ending: Ending) -> None:
    assert ending_of(add, go_on) == ending
