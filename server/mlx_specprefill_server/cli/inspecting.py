"""`mlx-specprefill inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mlx_specprefill import Engine, GenerationRequest, Inspection

from ..explain import ExplainedChunk, explain_chunks
from ..explaining.heatmap import render_heatmap
from .common import ONE_SHOT, begin, choose, make_prompt, make_settings, notes, one_line_errors, options_of, read_text
from .console import chunk_table, stage_bars
from .loading import load_engine
from .options import Draft, Dtype, Keep, Level, NoDraft, PairName, PairsFile, Question, Raw, Rule, Target

__all__ = ["inspect"]


def inspect(
    prompt_file: Annotated[Path, typer.Option(help="A text file; - reads standard input.")],
    question: Question = None,
    keep: Keep = None,
    rule: Rule = None,
    raw: Raw = False,
    html: Annotated[Path | None, typer.Option(help="Write a heat map of the prompt to this file.")] = None,
    show_dropped: Annotated[bool, typer.Option("--all", help="List the dropped chunks too.")] = False,
    pair: PairName = None,
    pairs_file: PairsFile = None,
    target: Target = None,
    draft: Draft = None,
    no_draft: NoDraft = False,
    dtype: Dtype = "auto",
    log_level: Level = "warning",
) -> None:
    """Show which chunks of a prompt the draft would keep, and why, without running the target."""
    begin(log_level)
    with one_line_errors():
        text = read_text(prompt_file)
        options = options_of(None, keep)
        chosen = choose(pair, pairs_file, target, draft, no_draft)
        settings = make_settings(chosen, rule=rule, **ONE_SHOT)
        with load_engine(chosen, dtype, settings, settings.engine_config()) as engine:
            prompt = make_prompt(engine.pair, text, question, raw)
            inspection = _inspect(engine, GenerationRequest(prompt.tokens, 1, specprefill=options, spans=prompt.spans))
            chunks = explain_chunks(engine.pair.tokenizer, prompt.tokens, inspection)
            _show(inspection, chunks, dropped_too=show_dropped)
            if html is not None:
                names = f"target {engine.pair.target_id}, draft {engine.pair.draft_id or 'none'}"
                html.write_text(render_heatmap(inspection, chunks, names), encoding="utf-8")
                notes().print(f"Heat map written to {html}", markup=False)


def _inspect(engine: Engine, request: GenerationRequest) -> Inspection:
    with stage_bars(notes()) as bars:
        return engine.inspect(request, bars.update)


def _show(inspection: Inspection, chunks: list[ExplainedChunk], *, dropped_too: bool) -> None:
    console = Console()
    console.print(chunk_table(chunks, dropped_too=dropped_too))
    kept = sum(chunk.kept for chunk in inspection.chunks)
    summary = (
        f"{inspection.kept_tokens} of {inspection.prompt_tokens} tokens kept, {kept} of {len(inspection.chunks)} "
        f"chunks; mode {inspection.mode}: {inspection.reason}"
    )
    console.print(summary, markup=False, highlight=False)
