"""`mlx-specprefill generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mlx_specprefill import Engine, Failed, GenerationRequest, SamplingParams

from ..local import stream_text
from .common import (
    FAILED,
    ONE_SHOT,
    begin,
    choose,
    make_prompt,
    make_settings,
    notes,
    one_line_errors,
    options_of,
    read_text,
)
from .console import stage_bars, stage_summary, stage_table
from .loading import load_engine
from .options import (
    Draft,
    Dtype,
    Keep,
    KvBits,
    Level,
    NoDraft,
    PairName,
    PairsFile,
    PrefillStep,
    Question,
    Raw,
    Rule,
    Target,
)

__all__ = ["generate"]

PrefillMode = Literal["auto", "sparse", "full"]
_ENABLED: dict[PrefillMode, bool | None] = {"auto": None, "sparse": True, "full": False}


def generate(
    prompt_file: Annotated[Path, typer.Option(help="A text file; - reads standard input.")],
    question: Question = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens in the answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    keep: Keep = None,
    rule: Rule = None,
    mode: Annotated[PrefillMode, typer.Option(help="auto: sparse above the pair's threshold.")] = "auto",
    raw: Raw = False,
    pair: PairName = None,
    pairs_file: PairsFile = None,
    target: Target = None,
    draft: Draft = None,
    no_draft: NoDraft = False,
    dtype: Dtype = "auto",
    prefill_step: PrefillStep = None,
    kv_bits: KvBits = None,
    log_level: Level = "warning",
) -> None:
    """Answer one prompt and show the time of each stage: the answer on standard output, the rest on standard error."""
    begin(log_level)
    with one_line_errors():
        text = read_text(prompt_file)
        options = options_of(_ENABLED[mode], keep)
        chosen = choose(pair, pairs_file, target, draft, no_draft)
        settings = make_settings(
            chosen,
            rule=rule,
            prefill_step=prefill_step,
            kv_bits=kv_bits,
            **ONE_SHOT,
        )
        with load_engine(chosen, dtype, settings, settings.engine_config()) as engine:
            prompt = make_prompt(engine.pair, text, question, raw)
            request = GenerationRequest(
                prompt.tokens,
                max_tokens,
                SamplingParams(temperature=temperature),
                options,
                spans=prompt.spans,
                stop_token_ids=engine.pair.eos_token_ids,
            )
            _answer(engine, request)


def _answer(engine: Engine, request: GenerationRequest) -> None:
    console = notes()
    with stage_bars(console) as bars:

        def show(text: str) -> None:
            bars.stop()
            typer.echo(text, nl=False)

        _, last = stream_text(engine, request, show, bars.update)
    typer.echo()
    if isinstance(last, Failed):
        typer.echo(f"error: {last.error}", err=True)
        raise typer.Exit(FAILED)
    console.print(stage_table(last.report, last.completion_tokens))
    console.print(stage_summary(last.report, last.completion_tokens), markup=False, highlight=False)
