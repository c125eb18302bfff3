"""The token that ends a turn in a chat template, where a model's files do not name it as the end of an answer."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

log = logging.getLogger(__name__)
TURN_END = "_turn_end"  # in the configuration of a loaded model
_CONTROL_NAME = re.compile(r"<\|[^|\s]+\|>|<(?:end_of_turn|eos)>|</s>")
_CHANNEL = "<|channel|>"  # of answers that are several messages, each with its own end
_QUESTION = {"role": "user", "content": "Qk0zX"}
_ANSWER = {"role": "assistant", "content": "Qk1zX"}
_NEXT = {"role": "user", "content": "Qk2zX"}
# Errors of templates on a conversation that they don't support. jinja2 wraps only some of them.
_TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def end_with_turns(tokenizer: TokenizerWrapper, config: dict[str, Any]) -> None:
    """End answers with what the chat template writes right behind an assistant's text.

    Without it, an answer goes on with the user's next turn. If the template writes an end token there, that one ends
    answers already. A model that was never taught such a token spells it, so the text is added to `config` as well.
    """
    added = tokenizer.get_added_vocab()
    if not tokenizer.has_chat_template or _CHANNEL in added:
        return
    ends = tokenizer.convert_ids_to_tokens(sorted(tokenizer.eos_token_ids))
    names = [name for name in sorted(added, key=len, reverse=True) if not name.isalnum()]
    for behind in _behind_answers(tokenizer):
        if any(name in behind for name in ends if name):
            return
        spelled = _CONTROL_NAME.match(behind)
        found = next(filter(behind.startswith, names), spelled and spelled[0])
        if found:
            log.info("%s ends a turn in the chat template, but is no end token: it ends answers too", found)
            config[TURN_END] = found
            tokenizer.eos_token_ids |= {added[found]} if found in added else set()
            return


def _behind_answers(tokenizer: TokenizerWrapper) -> Iterator[str]:
    """Yield the text between an assistant's and the end of the prompt, and the user's next one."""
    for more in ([], [_NEXT]):
        try:
            text: Any = tokenizer.apply_chat_template([_QUESTION, _ANSWER, *more], tokenize=False)
        except _TEMPLATE_ERRORS:
            continue
        _, answer, behind = str(text).partition(_ANSWER["content"])
        if answer:
            yield behind.partition(_NEXT["content"])[0].lstrip()
