"""Makes token ids and message spans of conversations and raw prompts, on worker threads.

Templates and tokenizers take seconds on the longest prompts, so they run on worker threads beside the event loop.
Several threads may use a fast tokenizer as long as none changes its settings.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeVar

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from mlx_specprefill import (
    ContextLengthError,
    GenerationRequest,
    InvalidRequestError,
    PromptSpan,
    Question,
    SpecPrefillOptions,
    TokenIds,
    as_token_ids,
)

from ..big_json import restored
from ..http.errors import refusal
from .compaction import asks_to_compact
from .conversation import MOST_NAMED, Conversation, Message
from .deferred import LOADS, Tool, with_schemas
from .form_probe import Show, ask, notation_of
from .forms import Form, messages_in, tools_in
from .next_turn import Asked, NextTurn, Part
from .reminders import SYSTEM, without_reminders
from .spans import CharSpan, Render, absent, left_out, locate, mark, to_tokens, turn_ends
from .special_tokens import ControlTokens, Encoded, Encoder, EscapedConversation
from .stable import remove_volatile_lines
from .tool_writer import ToolWriter
from .whole_or_part import about_everything, is_asked

T = TypeVar("T")

WORKERS = 4  # threads; the tokenizer releases the GIL while it works
PIECE = 16  # characters per token of the context in one tokenizer call; several times the rate of prose
SLACK = 2  # times the context; pieces may have a few more tokens than the whole, at the cuts
ENDS = 48  # tokens at each end of a prompt of ids in which its question is sought
HEADER = 64  # characters of a turn's header, which is read with each question behind a prompt if it has to be
ENDING = 256  # characters; more than a template writes to open an answer, for templates without a marker

WRITTEN = "the model's chat template shows no tool calls: those of the conversation are written as text"
CLOSED = "the model's chat template can't show half a thought: the answer does not go on with that of the last message"

EMPTY: Message = {"role": "user", "content": ""}

# Errors of templates on a conversation that they don't support. jinja2 wraps only some of them.
TEMPLATE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, AssertionError)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt for one answer.

    Attributes:
        tokens: its ids.
        spans: the rendered messages among them; none for a raw prompt.
        ending: what the text has of the assistant's turn that the answer goes on with.
        left_out: sentences about text that is not in it.
        about_everything: the words of its question that ask for the whole text.
        about_session: an agent compacts its session.
        about_part: words of it are known to ask for a part of the text, or nothing is known of it.
    """

    tokens: TokenIds
    spans: tuple[PromptSpan, ...] = ()
    ending: str = ""
    left_out: tuple[str, ...] = ()
    about_everything: str | None = None
    about_session: bool = False
    about_part: bool = True

    def request(self, max_tokens: int, options: SpecPrefillOptions) -> GenerationRequest:
        """Return the request for an answer, with all that is known of the prompt."""
        return GenerationRequest(
            self.tokens,
            max_tokens,
            specprefill=options,
            spans=self.spans,
            about_everything=self.about_everything,
            about_part=self.about_part,
            about_session=self.about_session,
        )


@dataclass(frozen=True)
class _Fitted:
    """A conversation in the form that its template took.

    Attributes:
        messages: of `render`; names of control tokens in them are escaped.
        rendered: what the template made of them.
        render: the template with everything but the messages fixed.
        unescape: turns a text back, character for character.
        left_out: as in `Prompt`, without what the template leaves out.
    """

    messages: Sequence[Message]
    rendered: str
    render: Render
    unescape: Callable[[str], str]
    left_out: tuple[str, ...]

    @cached_property
    def text(self) -> str:
        return self.unescape(self.rendered)


class PromptBuilder:
    """A builder of prompts for one model.

    Args:
        tokenizer: an mlx_lm TokenizerWrapper.
        context_length: tokens; texts that can't fit are refused before tokenization. None: no limit.
        template_kwargs: the template's arguments that conversations do not set themselves.

    Attributes:
        forms: what the chat template takes, by whether the request has tools; none without a template.
        workers: the threads that render and tokenize. They take any long call that uses the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        context_length: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.workers = Workers(WORKERS if getattr(tokenizer, "is_fast", False) else 1)
        self._context = context_length
        self._ends = _turn_ends(tokenizer)
        self._controls = ControlTokens(tokenizer)
        self._encoder = Encoder(tokenizer, self._controls)
        show = partial(_show, tokenizer)
        own = template_kwargs or {}
        forms = _forms(tokenizer, show).items()
        self.forms = {key: replace(form, kwargs={**form.kwargs, **own}) for key, form in forms}
        self._tools = ToolWriter(show, self.forms.get(True, Form()))

    @property
    def takes_tools(self) -> bool:
        """Return whether the chat template shows tools to the model. Without a template nothing is known."""
        return not self.forms or self.forms[True].shows_tools

    @property
    def template_kwargs(self) -> Mapping[str, Any]:
        """Return the template's arguments where a conversation sets none: those that keep thoughts, and the given."""
        return self.forms[True].kwargs if self.forms else {}

    async def chat(self, conversation: Conversation) -> Prompt:
        """Return the rendered conversation, ready for the assistant's answer.

        Raises:
            InvalidRequestError: the model has no chat template, or its template refuses the conversation.
            ContextLengthError: it can't fit the context.
        """
        return await self.workers.run(partial(self._chat, conversation))

    async def behind(self, conversation: Conversation, asked: Sequence[Asked]) -> tuple[Prompt, list[Question | str]]:
        """Return the rendered conversation up to one more turn of the user's, and each text as that turn, up to the
        answer, with the answers that it may have. In place of one that can't be read stands why.

        Raises:
            InvalidRequestError, ContextLengthError: as `chat`, or the template has no place for such a turn.
        """
        return await self.workers.run(partial(self._behind, conversation, asked))

    async def raw(self, text: str) -> Prompt:
        """Return an unrendered prompt, with the special tokens that the tokenizer adds and the text has not.

        Raises:
            ContextLengthError: it can't fit the context.
        """
        starts_itself = bool(self._tokenizer.bos_token) and text.startswith(self._tokenizer.bos_token)
        ids = await self.tokens(text, special=not starts_itself, field="prompt")
        return Prompt(as_token_ids(ids), about_everything=about_everything(text))

    def ids(self, ids: Sequence[int]) -> Prompt:
        """Return a prompt of token ids."""
        ends = map(self._tokenizer.decode, (list(ids[:ENDS]), list(ids[-ENDS:])))
        return Prompt(as_token_ids(ids), about_everything=about_everything("\n".join(ends)))

    async def text(self, conversation: Conversation) -> str:
        """Return the rendered conversation as text; raises as `chat`."""
        return (await self.workers.run(partial(self._fit, conversation))).text

    async def tokens(self, text: str, *, special: bool, field: str) -> list[int]:
        """Return the ids of a text. `special` adds the tokens that the tokenizer puts around prompts.

        Raises:
            ContextLengthError: it can't fit the context; names `field`.
        """
        return await self.workers.run(partial(self._tokens, text, special, field))

    async def count_tools(self, tools: Sequence[Tool]) -> int:
        """Return the tokens of tools, each as the template writes it."""
        return await self.workers.run(lambda: sum(self._count(self._tools.write(tool)) for tool in tools))

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
        spans, sentences = self._located(fitted, bool(conversation.tools))
        said = [without_reminders(m["content"]) for m in conversation.messages if m["role"] == "user"]
        questions = [text for text in said if text.strip()]
        words = about_everything(questions[-1]) if questions else None
        goes_on = any(message["role"] == "assistant" for message in conversation.messages)
        compacts = goes_on and conversation.messages[-1]["role"] == "user" and asks_to_compact(said[-1])
        systems = [message["content"] for message in conversation.messages if message["role"] in SYSTEM]
        asked = is_asked((*systems, *questions[-2:]))
        places = () if offsets is None else to_tokens(spans, offsets)
        return Prompt(as_token_ids(tokens), places, ending, sentences, words, compacts, asked)

    def _behind(self, conversation: Conversation, asked: Sequence[Asked]) -> tuple[Prompt, list[Question | str]]:
        field, contents = conversation.field, "".join(message["content"] for message in conversation.messages)
        self.check_length(contents, field)
        word = absent(contents)
        messages = (*conversation.messages, {"role": "user", "content": word})
        fitted = self._fit(replace(conversation, messages=messages))
        if fitted.rendered.count(word) != 1:
            raise refusal(field, "the model's chat template shows no message after it")
        end = fitted.rendered.index(word)
        whole = Part(fitted.text, self._controls.places(fitted.rendered))
        start = max((at for at, _ in whole.controls if at < end), default=0)
        start = start if end - start <= HEADER else end
        tokens, offsets = self._encoder.encode(*whole.part(0, start), field)
        left = None if self._context is None else self._context - len(tokens)
        if left is not None and left < 1:
            raise ContextLengthError(len(tokens), 1, self._context or 0, field)
        turn = NextTurn(
            lambda part: self._encoder.encode(*part, "the question")[0],
            whole.part(start, end),
            whole.part(end + len(word)),
            left,
        )
        rows = [turn.read(one) for one in asked]
        if all(turn.begins(row) for row in rows if isinstance(row, Question)):
            rows = [row if isinstance(row, str) else turn.behind_header(row) for row in rows]
            tokens += turn.header
        spans, sentences = self._located(fitted, bool(conversation.tools))
        before = [replace(span, end=min(span.end, start)) for span in spans if span.content_end <= start]
        located = to_tokens(before, offsets) if offsets is not None else ()
        return Prompt(as_token_ids(tokens), located, left_out=sentences), rows

    def _located(self, fitted: _Fitted, has_tools: bool) -> tuple[list[CharSpan], tuple[str, ...]]:
        """Return the spans of the messages, and sentences about what is left out."""
        marked = mark(fitted.messages, fitted.rendered, fitted.render)
        missing = map(fitted.unescape, islice(left_out(fitted.messages, fitted.rendered, marked), MOST_NAMED))
        spans = locate(fitted.messages, fitted.rendered, marked, self._ends, has_tools)
        return spans, (*fitted.left_out, *missing)

    def _fit(self, conversation: Conversation) -> _Fitted:
        """Return the conversation in the form that the template takes, without volatile lines.

        An answer is opened in place of a last message with which it can't go on.
        """
        if conversation.ending != "continue" or not _is_silent(conversation.messages[-1]):
            return self._fit_whole(conversation)
        opened = replace(conversation, messages=conversation.messages[:-1] or (EMPTY,), ending="answer")
        if "reasoning" not in conversation.messages[-1]:
            return self._fit_whole(opened)
        try:
            return self._fit_whole(conversation)
        except InvalidRequestError:
            return self._fit_whole(replace(opened, left_out=(*opened.left_out, CLOSED)))

    def _fit_whole(self, conversation: Conversation) -> _Fitted:
        """Return all of the conversation in the form. Half a thought that the template doesn't show is refused."""
        sentences = conversation.left_out
        if any(LOADS in message for message in conversation.messages):
            messages = (with_schemas(m, self._tools.write) if LOADS in m else m for m in conversation.messages)
            conversation = replace(conversation, messages=tuple(messages))
        if conversation.messages[0]["role"] == "system":
            conversation, lines = remove_volatile_lines(conversation)
            sentences += lines
        if not self._tokenizer.has_chat_template:
            raise InvalidRequestError("This model has no chat template; use /v1/completions.", field=conversation.field)
        if "documents" in conversation.template_kwargs and "documents" not in str(self._tokenizer.chat_template):
            raise refusal("documents", "this model's template has no place for them")
        form = self.forms[bool(conversation.tools)]
        if form.calls == "written" and any("tool_calls" in message for message in conversation.messages):
            sentences += (WRITTEN,)
        escaped = EscapedConversation(conversation, self._controls)

        def read(messages: Sequence[Message]) -> str:
            return escaped.from_json(_render(self._tokenizer, form, escaped.conversation, messages))

        given = escaped.conversation.messages
        return _Fitted(given, read(given), read, escaped.unescape, sentences)

    def _tokenize(self, fitted: _Fitted, field: str) -> Encoded:
        return self._encoder.encode(fitted.text, self._controls.places(fitted.rendered), field)


def _show(tokenizer: Any, form: Form, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
    return _render(tokenizer, form, Conversation(tuple(messages), tuple(tools)), messages)


def _forms(tokenizer: Any, show: Show) -> dict[bool, Form]:
    """Ask the template with tools and without them."""
    if not tokenizer.has_chat_template:
        return {}
    notation = notation_of(str(getattr(tokenizer, "chat_template", "") or ""), tokenizer.get_added_vocab())
    return {has_tools: ask(show, notation, has_tools) for has_tools in (False, True)}


def _render(tokenizer: Any, form: Form, conversation: Conversation, messages: Sequence[Message]) -> str:
    """Return the template's rendering of the messages in this form.

    Raises:
        InvalidRequestError: it refuses them.
    """
    going_on, word = dict[str, bool](), ""
    if conversation.ending == "continue" and _is_silent(messages[-1]):
        word = absent(str(messages))
        thought = messages[-1]["reasoning"].rstrip() + word
        messages = [*messages[:-1], messages[-1] | {"reasoning": thought, "reasoning_content": thought}]
    elif conversation.ending == "continue":
        going_on["continue_final_message"] = True
    apply = (
        partial(_apply_with_nulls, tokenizer) if form.null else partial(tokenizer.apply_chat_template, tokenize=False)
    )
    try:
        text = apply(
            messages_in(form, messages),
            tools=tools_in(form, conversation.tools),
            add_generation_prompt=conversation.ending == "answer",
            **going_on,
            **{**form.kwargs, **conversation.template_kwargs},
        )
    except (*TEMPLATE_ERRORS, TemplateError) as error:
        message = f"The model's chat template refuses this conversation: {error}"
        raise InvalidRequestError(message[:1000], field=conversation.field) from error
    text = restored(str(text))
    if word not in text:
        raise refusal(conversation.field, "the model's chat template doesn't show a thought without an answer")
    return text[: text.rindex(word)] if word else text


def _is_silent(message: Message) -> bool:
    """Return whether there is nothing in an assistant's message, or a thought alone."""
    return message["role"] == "assistant" and not message["content"].strip() and "tool_calls" not in message


def _apply_with_nulls(tokenizer: Any, messages: Sequence[Message], /, tools: Any, **kwargs: Any) -> str:
    """Render as `apply_chat_template`, which leaves out members that are null."""
    template = tokenizer.get_chat_template(tools=tools)
    given = {**tokenizer.special_tokens_map, "enable_thinking": tokenizer.has_thinking, **kwargs}
    out: Any = render_jinja_template([list(messages)], tools=tools, chat_template=template, **given)
    return str(out[0][0])  # the first conversation's text


def _goes_on(messages: Sequence[Message]) -> bool:
    """Return whether the user speaks behind an answer."""
    return messages[-1]["role"] == "user" and any(message["role"] == "assistant" for message in messages)


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
        except StopIteration as error:
            raise RuntimeError("a call ended like an iterator") from error  # a future would never get a StopIteration
        finally:
            del self._begun[job]

    def close(self) -> None:
        """Refuse further calls. Running ones end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)
