from __future__ import annotations

import asyncio
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import processors

from mlx_specprefill_server.conversation import conversation
from mlx_specprefill_server.prompt import PromptBuilder

from .fakes import byte_tokenizer

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
    assert asyncio.run(builder.raw("a")).tokens == (start, 64)
    assert asyncio.run(builder.raw("<bos>a")).tokens == (start, 64)


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
