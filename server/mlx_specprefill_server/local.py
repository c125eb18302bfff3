"""A pair in this process, for Python programs: conversations in, text out, without a server.

Example::

    with open_pair("demo") as pair:
        answer = pair.chat([{"role": "user", "content": text + question}], specprefill=True)
        print(answer.text, answer.report.mode, answer.report.kept_tokens)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from mlx_specprefill import (
    DtypeName,
    Engine,
    EngineClosedError,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    PrefillReport,
    SamplingParams,
    SpecPrefillOptions,
    TokenEvent,
    keep_pct,
)

from .generation.reader import IncrementalDetokenizer, StopMatcher, Vocabulary
from .pair_loading import load_engine
from .pairs import Pair, PairsError, find_pair
from .prompt.builder import PromptBuilder
from .prompt.conversation import conversation
from .settings.pair import make_settings
from .settings.server import Settings


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of `LocalPair.chat`.

    Attributes:
        finish_reason: "stop", or "length" where `max_tokens` ended it.
        report: how the prompt was prefilled, how many tokens the target read, the times of the stages.
    """

    text: str
    finish_reason: FinishReason
    completion_tokens: int
    report: PrefillReport


class LocalPair:
    """A loaded pair and its thread, as a context manager. Later turns reuse the cache of earlier ones.

    Attributes:
        engine: for requests in tokens.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._prompts = PromptBuilder(engine.pair.tokenizer, engine.pair.context_length)

    def __enter__(self) -> LocalPair:
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        specprefill: bool | None = None,
        keep: Fraction | float | None = None,
        max_tokens: int = 512,
        temperature: float = 0.0,
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:
        """Answer a conversation, rendered with the model's own chat template.

        Args:
            messages: as OpenAI's chat completions take them; a text is one message of the user.
            specprefill: True: sparse prefill; False: full prefill; None: sparse if it is predicted to save enough time.
            keep: share of the prompt's chunks to keep, in (0, 1]; None: the pair's.
            on_text: called with each new piece of the answer.

        Raises:
            InvalidRequestError: the conversation is malformed or does not fit the context.
            SpecPrefillError, MemoryError: the request failed.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        work = self._prompts.chat(conversation([dict(message) for message in messages]))
        with ThreadPoolExecutor(1) as thread:  # a notebook already runs an event loop on this one
            prompt = thread.submit(asyncio.run, work).result()
        share = None if keep is None else keep_pct(keep, "keep")
        request = replace(
            prompt.request(max_tokens, SpecPrefillOptions(specprefill, share)),
            sampling=SamplingParams(temperature=temperature),
            stop_token_ids=self.engine.pair.eos_token_ids,
        )
        text, end = stream_text(self.engine, request, on_text or (lambda text: None))
        if isinstance(end, Failed):
            raise end.error
        return Answer(text, end.reason, end.completion_tokens, end.report)


def stream_text(
    engine: Engine,
    request: GenerationRequest,
    on_text: Callable[[str], None],
) -> tuple[str, Finished | Failed]:
    """Run a request, pass its text on piece by piece, and return the text and the last event.

    Raises:
        EngineClosedError: the engine stopped before.
    """
    text = IncrementalDetokenizer(Vocabulary(engine.pair.tokenizer).decode, request.prompt)
    turn = StopMatcher([end for end in [engine.pair.turn_end] if end is not None])
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        on_text(piece)

    for event in engine.generate(request):
        match event:
            case TokenEvent() if event.token not in request.stop_token_ids:
                show(turn.push(text.push(event.token)))
            case Finished() | Failed():
                show(turn.push(text.finish()) + turn.finish())
                return "".join(pieces), event
    raise EngineClosedError("the engine stopped before the answer was complete")


def open_pair(
    name: str | None = None,
    *,
    target: str | None = None,
    draft: str | None = None,
    pairs_file: Path | None = None,
    dtype: DtypeName = "auto",
    **settings: Any,
) -> LocalPair:
    """Load a pair as `mlx-specprefill serve` does. The first time, calibrate its draft.

    Args:
        name: name of a pair, like "demo" or "smollm2". Give `target` and `draft` instead for folders, GGUF files or
            repository ids.
        settings: the server's settings by name, like `memory_limit="8GB"`. MLX_SPECPREFILL_* variables apply too.

    Raises:
        PairsError: there is neither a name nor a target, no such pair, or its models are not on this machine.
        SpecPrefillError: the models can't be loaded.
        TypeError: there is no such setting.
    """
    if unknown := settings.keys() - Settings.model_fields.keys():
        raise TypeError(f"open_pair has no setting {', '.join(sorted(unknown))}")
    if (name is None) == (target is None):
        raise PairsError("open_pair takes either the name of a pair or a target")
    pair = find_pair(str(name), pairs_file) if target is None else Pair(target=target, draft=draft)
    known = make_settings(pair, **settings)
    return LocalPair(load_engine(pair, dtype, known, known.engine_config(), calibrate=True))
