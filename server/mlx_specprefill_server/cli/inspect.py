"""The options of `mlx-specprefill inspect`. Its work (`inspecting`) is imported once they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_specprefill import RuleName, SpecPrefillOptions, keep_pct

from ..settings.pair import ONE_SHOT, make_settings
from ..settings.server import description_of
from .common import OptionError, ask_server, begin, choose_here, one_line_errors, read_text
from .options import ApiKey, Keep, Level, PairOptions, Url, takes_pair


@takes_pair
def inspect(
    prompt_file: Annotated[Path | None, typer.Option(help="A text file; - reads standard input.")] = None,
    misses: Annotated[
        bool, typer.Option("--misses", help="Show instead why a running server read prompts again.")
    ] = False,
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    question: Annotated[
        str | None, typer.Option(help="Question to append to the file's text, in the same user message.")
    ] = None,
    keep: Keep = None,
    rule: Annotated[RuleName | None, typer.Option(help=description_of("rule"))] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Use the text itself as the prompt, without a chat template.")
    ] = False,
    show_dropped: Annotated[bool, typer.Option("--all", help="List the dropped chunks too.")] = False,
    log_level: Level = "warning",
    *,
    models: PairOptions,
) -> None:
    """Show which chunks of a prompt the draft would keep, and why, without running the target."""
    begin(log_level)
    with one_line_errors():
        if misses:
            _show_misses(ask_server(url, "/v1/specprefill/stats", api_key, "recent")["recent"])
            return
        if prompt_file is None:
            raise OptionError("--prompt-file or --misses is needed")
        text = read_text(prompt_file)
        if question is not None:
            text = f"{text.rstrip()}\n\n{question}"
        options = SpecPrefillOptions(keep_pct=None if keep is None else keep_pct(keep, "--keep-pct"))
        chosen = choose_here(models)
        settings = make_settings(chosen, rule=rule, **ONE_SHOT)
        work = import_module(".inspecting", __package__)
        work.inspect(chosen, models.dtype, settings, text, options, raw=raw, dropped_too=show_dropped)


def _show_misses(answers: Iterable[Mapping[str, Any]]) -> None:
    """Print a line for each of the last answers whose prompt was read again."""
    reports = [answer["specprefill"] for answer in answers if answer["specprefill"]]
    missed = [(report, report["cache"]["miss"]) for report in reports if "cache" in report]
    for report, miss in missed:
        place = "the template" if miss["role"] is None else f"message {miss['message']} ({miss['role']})"
        typer.echo(
            f"{report['cached_tokens']} of {report['prompt_tokens']} tokens were cached; "
            f"then, at token {miss['token']}, {place} differs ({miss['kind']}): {miss['was']!r} -> {miss['now']!r}; "
            f"{miss['read_tokens']} tokens were read again"
        )
    if not missed:
        typer.echo(f"None of the last {len(reports)} prompts was read again.")
