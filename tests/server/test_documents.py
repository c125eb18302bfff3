"""Documents in system messages, told from instructions."""

from __future__ import annotations

import asyncio
import time

import pytest

from mlx_specprefill_server.prompting.conversation import conversation
from mlx_specprefill_server.prompting.documents import documents_in
from mlx_specprefill_server.prompting.prompt import PromptBuilder

from .fakes import CHATML, byte_tokenizer

PROSE = "The ferry leaves the north pier at noon and comes back before the lamps are lit. " * 40 + "\n"
RULES = "You answer questions of the crew. Be brief, and never guess a number.\n\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<document>", "</document>\nAnswer in one line."),
        ('<item path="notes/ferry.txt">\n', "</item>"),
        ("<knowledge_base>", "</knowledge_base>"),
        ("Text of the log:\n```text\n", "\n```\nThat is all."),
        ("Here is the employee handbook:\n\n", "---\nAnswer in one line."),
        ("Context:\n", ""),
        ("# File: ferry.py\n", "# Tone\nBe kind.\n"),
        ("## notes/ferry.md\n", "# Tone\nBe kind.\n"),
        ("The following documents were found:\n", "***\n"),
    ],
)
def test_a_long_text_that_is_announced_is_a_document(before: str, after: str) -> None:
    text = RULES + before + PROSE + after
    assert [text[start:end].strip() for start, end in documents_in(text)] == [PROSE.strip()]


@pytest.mark.parametrize(
    "text",
    [
        RULES + PROSE,
        f"# Tone\n{PROSE}",
        f"# File formats\n{PROSE}",
        f"When you edit a file:\n{PROSE}",
        f"Instructions from: /home/me/AGENTS.md\n{PROSE}",
        f"<rules>{PROSE}</rules>",
        f"<document>{PROSE[:500]}</document>",
        f"<document>{PROSE}",
        "",
    ],
)
def test_everything_else_is_an_instruction(text: str) -> None:
    assert documents_in(text) == []


def test_several_documents_are_told_apart() -> None:
    text = f"{RULES}# File: one.md\n{PROSE}# File: two.md\n{PROSE}# Rules\n{RULES}"
    assert [text[start:end] for start, end in documents_in(text)] == [PROSE, PROSE]


@pytest.mark.parametrize("line", ["```\n", "<doc>\n", "# File: x\n", "Context:\n", "<data a='b'>", "#" * 100 + "\n"])
def test_no_text_takes_long(line: str) -> None:
    begun = time.monotonic()
    documents_in(line * (1_000_000 // len(line)))
    assert time.monotonic() - begun < 20


def test_spans_of_system_messages_have_them_in_tokens() -> None:
    tokenizer = byte_tokenizer(CHATML)
    text = f"{RULES}<document>{PROSE}</document>\nAnswer in one line."
    messages = [
        {"role": "system", "content": f"  {text}"},
        {"role": "user", "content": f"<document>{PROSE}</document>"},
    ]
    prompt = asyncio.run(PromptBuilder(tokenizer).chat(conversation(messages)))
    system, user = prompt.spans
    ((start, end),) = system.documents
    assert tokenizer.decode(prompt.tokens[start:end].tolist()) == PROSE
    assert user.documents == ()
