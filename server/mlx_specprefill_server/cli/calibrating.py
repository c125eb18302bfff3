"""`mlx-specprefill calibrate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mlx_specprefill import DraftHeads, SpecPrefillPolicy, break_even
from mlx_specprefill import calibrate as measure_pair

from .common import begin, choose, make_settings, notes, one_line_errors
from .console import cost_table
from .loading import load
from .options import Draft, DraftLayers, Dtype, HeadsFile, Keep, Level, NoDraft, PairName, PairsFile, Target

__all__ = ["calibrate"]


def calibrate(
    keep: Keep = None,
    out: Annotated[Path | None, typer.Option(help="Write the draft's calibration to this file too.")] = None,
    pair: PairName = None,
    pairs_file: PairsFile = None,
    target: Target = None,
    draft: Draft = None,
    no_draft: NoDraft = False,
    draft_layers: DraftLayers = None,
    draft_heads: HeadsFile = None,
    dtype: Dtype = "auto",
    log_level: Level = "warning",
) -> None:
    """Find the draft's heads, measure both models on this machine, and show from which length a sparse prefill pays.

    Takes up to a minute and wants the machine for itself; the server's next starts use what was measured.
    """
    begin(log_level)
    with one_line_errors():
        chosen = choose(pair, pairs_file, target, draft, draft_layers, draft_heads, no_draft)
        settings = make_settings(chosen, specprefill_keep_pct=keep)
        config = settings.engine_config()
        loaded = load(chosen, dtype, settings, calibrate=True)
        if loaded.heads is not None:
            typer.echo(_heads_text(loaded.heads))
            if out is not None:
                out.write_text(json.dumps(loaded.heads.to_dict()), encoding="utf-8")
        with notes().status("Measuring"):
            cost = measure_pair(loaded, config)
        longest = min(loaded.context_length, loaded.draft_context or loaded.context_length)
        Console().print(cost_table(cost, config.policy, longest))
        typer.echo(
            "Prompts are read {} (target) and {} (draft) tokens at a time.".format(*cost.steps(config.prefill_step))
        )
        typer.echo(_break_even_text(break_even(cost, config.policy, longest), config.policy))


def _heads_text(heads: DraftHeads) -> str:
    found = ", ".join(f"{kind} {share:.2f}" for kind, share in heads.recall.items())
    return (
        f"{len(heads.heads)} heads in {heads.depth} of the draft's {heads.layers} layers. Share of the answers' tokens "
        f"that they keep at 20 %: {found}."
    )


def _break_even_text(found: int | None, policy: SpecPrefillPolicy) -> str:
    margins = f"saves {float(policy.min_saving_share):.0%} and {policy.min_saving_ms / 1e3:g} s"
    if found is None:
        return f"No prompt that fits the context {margins} at keep {float(policy.keep_pct):g}."
    return f"At keep {float(policy.keep_pct):g} a sparse prefill {margins} from {found:,} uncached tokens on."
