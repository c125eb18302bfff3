"""Token ids and message spans of conversations and raw prompts.

Templates and tokenizers take seconds on the longest prompts, so they run on worker threads beside the event loop.
Several threads may use a fast tokenizer as long as none changes its settings.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from jinja2 import TemplateError

from mlx_specprefill import ContextLengthError, InvalidRequestError, PromptSpan, TokenIds, as_token_ids

from ..errors import refusal
from .conversation import Conversation, Message, simpler_forms
from .spans import Render, locate, to_tokens, turn_ends
from .special_tokens import ControlTokens, Encoded, Encoder, EscapedConversation
from .stable import remove_volatile_lines

T = TypeVar("T")

WORKERS = 4  # threads; the tokenizer releases the GIL while it works
PIECE = 16  # characters per token of the context in one tokenizer call; several times the rate of prose
SLACK = 2  # times the context; pieces may have a few more tokens than the whole, at the cuts
ENDING = 256  # characters; more than a template writes to open an answer, for templates without a marker

# Errors of templates on a conversation that they don't support. jinja2 wraps only some of them.
TEMPLATE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, AssertionError)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids, and the rendered messages among them (none for a raw prompt); `ending`: what the text has
    of the assistant's turn that the answer goes on with; `left_out`: sentences about text that is not in it."""

    tokens: TokenIds
    spans: tuple[PromptSpan, ...] = ()
    ending: str = ""
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A conversation in the form that its template took.

    Attributes:
        messages: of `render`; names of control tokens in them are escaped.
        rendered: what the template made of them; `text`: the same, character for character, unescaped.
        render: the template with everything but the messages fixed.
        left_out: as in `Prompt`.
    """

    messages: Sequence[Message]
    rendered: str
    text: str
    render: Render
    left_out: tuple[str, ...]


class PromptBuilder:
    """A builder of prompts for one model.

    Args:
        tokenizer: an mlx_lm TokenizerWrapper.
        context_length: tokens; texts that can't fit are refused before tokenization. None: no limit.
        allow_special_tokens: names of control tokens in a conversation's content are those tokens, not text.

    Attributes:
        workers: the threads that render and tokenize. They take any long call that uses the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        context_length: int | None = None,
        allow_special_tokens: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self.workers = Workers(WORKERS if getattr(tokenizer, "is_fast", False) else 1)
        self._context = context_length
        self._ends = _turn_ends(tokenizer)
        self._controls = ControlTokens(tokenizer)
        self._encoder = Encoder(tokenizer, self._controls)
        self._allow_special = allow_special_tokens

    @property
    def takes_tools(self) -> bool:
        """Return whether the chat template mentions tools. True if the template is not available as text."""
        template = getattr(self._tokenizer, "chat_template", None)
        return "tools" in template if isinstance(template, str) else True

    async def chat(self, conversation: Conversation) -> Prompt:
        """Return the rendered conversation, ready for the assistant's answer.

        Raises:
            InvalidRequestError: the model has no chat template, or its template refuses the conversation.
            ContextLengthError: it can't fit the context.
        """
        return await self.workers.run(partial(self._chat, conversation))

    async def raw(self, text: str) -> Prompt:
        """Return an unrendered prompt, with the special tokens that the tokenizer adds and the text has not.

        Raises:
            ContextLengthError: it can't fit the context.
        """
        starts_itself = bool(self._tokenizer.bos_token) and text.startswith(self._tokenizer.bos_token)
        return Prompt(as_token_ids(await self.tokens(text, special=not starts_itself, field="prompt")))

    async def text(self, conversation: Conversation) -> str:
        """Return the rendered conversation as text; raises as `chat`."""
        return (await self.workers.run(partial(self._fit, conversation))).text

    async def tokens(self, text: str, *, special: bool, field: str) -> list[int]:
        """Return the ids of a text. `special` adds the tokens that the tokenizer puts around prompts.

        Raises:
            ContextLengthError: it can't fit the context; names `field`.
        """
        return await self.workers.run(partial(self._tokens, text, special, field))

    def check_length(self, text: str, field: str) -> None:
        """Refuse a text that can't fit before all of it is tokenized. The context bounds the work, whatever the text.

        Raises:
            ContextLengthError: names `field`; its count of tokens is that of the beginning that was read.
        """
        if self._context is None or len(text) <= PIECE * self._context:
            return
        step, tokens = PIECE * max(1, self._context), 0
        for start in range(0, len(text), step):
            tokens += self._count(text[start : start + step])
            if tokens > SLACK * self._context:
                raise ContextLengthError(tokens, 1, self._context, field)

    def _count(self, text: str) -> int:
        if getattr(self._tokenizer, "is_fast", False):
            backend = self._tokenizer.backend_tokenizer
            return len(backend.encode_batch_fast([text], add_special_tokens=False)[0])
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def _tokens(self, text: str, special: bool, field: str) -> list[int]:
        self.check_length(text, field)
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def _chat(self, conversation: Conversation) -> Prompt:
        # Templates may omit the reasoning of the assistant's messages.
        contents = [message["content"] for message in conversation.messages if message["role"] != "assistant"]
        self.check_length("".join(contents), conversation.field)
        fitted = self._fit(conversation)
        self.check_length(fitted.text, conversation.field)
        tokens, offsets = self._tokenize(fitted, conversation.field)
        ending = _ending(fitted.rendered, self._ends)
        if offsets is None:
            return Prompt(as_token_ids(tokens), ending=ending, left_out=fitted.left_out)
        spans = locate(fitted.messages, fitted.rendered, fitted.render, self._ends, bool(conversation.tools))
        return Prompt(as_token_ids(tokens), to_tokens(spans, offsets), ending, fitted.left_out)

    def _fit(self, conversation: Conversation) -> _Fitted:
        """Return the conversation in the first form that the template takes, without volatile lines."""
        left_out: tuple[str, ...] = ()
        if conversation.messages[0]["role"] == "system":
            conversation, left_out = remove_volatile_lines(conversation)
        if not self._tokenizer.has_chat_template:
            raise InvalidRequestError("This model has no chat template; use /v1/completions.", field=conversation.field)
        if "documents" in conversation.template_kwargs and "documents" not in str(self._tokenizer.chat_template):
            raise refusal("documents", "this model's template has no place for them")
        if self._allow_special:
            render = partial(self._render, conversation)
            messages, rendered = _first_form(conversation.messages, render)
            return _Fitted(messages, rendered, rendered, render, left_out)
        escaped = EscapedConversation(conversation, self._controls)

        def read(messages: Sequence[Message]) -> str:
            return escaped.from_json(self._render(escaped.conversation, messages))

        messages, rendered = _first_form(escaped.conversation.messages, read)
        return _Fitted(messages, rendered, escaped.unescape(rendered), read, left_out)

    def _render(self, conversation: Conversation, messages: Sequence[Message]) -> str:
        going_on = {"continue_final_message": True} if conversation.ending == "continue" else {}
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in conversation.tools] or None,
                add_generation_prompt=conversation.ending == "answer",
                tokenize=False,
                **going_on,
                **conversation.template_kwargs,
            )
        except (*TEMPLATE_ERRORS, TemplateError) as error:
            message = f"The model's chat template refuses this conversation: {error}"
            raise InvalidRequestError(message[:1000], field=conversation.field) from error
        return str(text)

    def _tokenize(self, fitted: _Fitted, field: str) -> Encoded:
        if self._allow_special:
            return self._encoder.encode_raw(fitted.text)
        return self._encoder.encode(fitted.text, self._controls.places(fitted.rendered), field)


def _first_form(messages: Sequence[Message], render: Render) -> tuple[Sequence[Message], str]:
    """Return the messages in the first form that the template takes, and its rendering of them."""
    try:
        return messages, render(messages)
    except InvalidRequestError as refusal:
        for others in simpler_forms(messages):
            with suppress(InvalidRequestError):
                return others, render(others)
        raise refusal


def _ending(text: str, ends: re.Pattern[str]) -> str:
    begun = max((match.end() for match in ends.finditer(text)), default=max(len(text) - ENDING, 0))
    return text[begun:]


def _turn_ends(tokenizer: Any) -> re.Pattern[str]:
    template = str(getattr(tokenizer, "chat_template", "") or "")
    added = tokenizer.get_added_vocab()
    eos = [tokenizer.convert_ids_to_tokens([token])[0] for token in sorted(tokenizer.eos_token_ids)]
    return turn_ends(eos, lambda marker: marker in added or marker in template)


class Workers:
    """Threads that run calls in order of arrival, `count` of them at a time."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="prompts")
        self._waiting: set[object] = set()
        self._begun: dict[object, float] = {}  # by the monotonic clock

    async def run(self, call: Callable[[], T]) -> T:
        """Return the call's result. A cancelled caller also cancels a call that has not begun."""
        job = object()
        self._waiting.add(job)
        future = self._pool.submit(self._run_watched, job, call)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._waiting.discard(job)

    @property
    def waiting(self) -> int:
        """The number of calls that no thread has begun."""
        return len(self._waiting)

    @property
    def longest_s(self) -> float:
        """Return how long the oldest running call has run, in seconds; 0 if none runs."""
        return max((time.monotonic() - begun for begun in list(self._begun.values())), default=0.0)

    def _run_watched(self, job: object, call: Callable[[], T]) -> T:
        self._waiting.discard(job)
        self._begun[job] = time.monotonic()
        try:
            return call()
        finally:
            del self._begun[job]

    def close(self) -> None:
        """Refuse further calls. Running ones end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)
