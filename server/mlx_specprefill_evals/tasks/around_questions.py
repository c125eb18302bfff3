"""The places of a question, and what agents and other programs write around it."""

from __future__ import annotations

import json
from typing import NamedTuple

from ..facts import Turn

# What other programs write around a question: Aider, Cline, Open WebUI, LangChain, Claude Code.
_EDIT_RULES = """
# *SEARCH/REPLACE block* Rules:

Every *SEARCH/REPLACE block* must use this format:
1. The *FULL* file path alone on a line, verbatim. No bold asterisks, no quotes around it, no escaping of characters.
2. The opening fence and code language, eg: ```python
3. The start of search block: <<<<<<< SEARCH
4. A contiguous chunk of lines to search for in the existing source code
5. The dividing line: =======
6. The lines to replace into the source code
7. The end of the replace block: >>>>>>> REPLACE
8. The closing fence: ```

ONLY EVER RETURN CODE IN A *SEARCH/REPLACE BLOCK*!"""
_ENVIRONMENT = """<environment_details>
# VSCode Visible Files
src/main.py

# VSCode Open Tabs
src/main.py,README.md

# Current Time
26/11/2026, 9:14:02 am (Europe/Berlin, UTC+1:00)

# Current Mode
ACT MODE
</environment_details>"""
_GUIDELINES = """### Task:
Respond to the user query using the provided context, incorporating inline citations in the format [id].

### Guidelines:
- If you don't know the answer, clearly state that.
- Respond in the same language as the user's query.
- If the context is unreadable or of poor quality, inform the user and provide the best possible answer."""
_PIECES = (
    "Use the following pieces of context to answer the question at the end. If you don't know the answer, just say that"
    " you don't know, don't try to make up an answer."
)
_REMINDER = """<system-reminder>
As you answer the user's questions, you can use the following context. IMPORTANT: this context may or may not be
relevant to your tasks. You should not respond to this context unless it is highly relevant to your task.
</system-reminder>"""
_SCHEMA = json.dumps({
    "type": "object",
    "properties": {"answer": {"type": "string", "description": "the answer"}, "confidence": {"type": "number"}},
    "required": ["answer"],
})  # fmt: skip
_RULES = "\n- ".join((
    "Rules for your answer:",
    "Keep it short.",
    "Use plain language, no headings and no lists.",
    "Say so if the text does not tell.",
))  # fmt: skip
_SIGNATURE = "Kind regards,\n\nMaria Lindqvist\nHead of Operations\nNorthern Harbour Logistics AB\nwww.example.org"
_FORMAT = "Give the answer as a single sentence, without any introduction, and add nothing that was not asked for."


class Place(NamedTuple):
    """The place of a question: the turns' texts with `$document`, or its halves `$first` and `$second`, and
    `$question`; the last turn's answer is the item's."""

    turns: tuple[Turn, ...]
    system: str = ""


def _alone(text: str, system: str = "") -> Place:
    return Place((Turn(text, ""),), system)


PLACES = {
    "end": _alone("$document\n\n$question"),
    "turn_after": Place((Turn("$document", "What would you like to know?"), Turn("$question", ""))),
    "front": _alone("$question\n\n$document"),
    "front_of_file": _alone('$question\n\n<document name="notes.txt">\n$document\n</document>'),
    "front_of_fence": _alone("Question: $question\n\n```\n$document\n```"),
    "front_and_rules": _alone(f"$question\n\n$document\n\n{_RULES}"),
    "both": _alone("$question\n\n$document\n\n$question"),
    "before_format": _alone(f"$document\n\n$question\n{_FORMAT}"),
    "before_rules": _alone(f"$document\n\n$question\n\n{_RULES}"),
    "before_schema": _alone(f"$document\n\n$question\n\nRespond with JSON of this schema:\n```json\n{_SCHEMA}\n```"),
    "before_signature": _alone(f"$document\n\n$question\n\n{_SIGNATURE}"),
    "before_steps": _alone("$document\n\n$question Let's think step by step, and give the answer on the last line."),
    "before_thanks": _alone("$document\n\n$question\n\nThanks in advance!"),
    "before_edit_rules": Place((Turn("Here are files:\n\n$document", "Ok."), Turn(f"$question\n{_EDIT_RULES}", ""))),
    "before_environment": _alone(
        f"<task>\n$question\n</task>\n\n<file_content>\n$document\n</file_content>\n\n{_ENVIRONMENT}"
    ),
    "after_reminder": _alone(f"$document\n\n{_REMINDER}\n$question\n\n{_REMINDER}"),
    "in_pieces": _alone(f"{_PIECES}\n\n$document\n\nQuestion: $question\nHelpful Answer:"),
    "in_a_query": _alone(
        f"{_GUIDELINES}\n\n<user_query>\n$question\n</user_query>\n\n<context>\n$document\n</context>"
    ),
    "system": _alone("$document", "You answer questions about texts. $question"),
    "system_and_rules": _alone("$document", f"$question\n\n{_RULES}"),
    "turn_before": Place((Turn("$question", "Please send me the text."), Turn("$document", ""))),
    "between": _alone("$first\n\n$question\n\n$second"),
}
