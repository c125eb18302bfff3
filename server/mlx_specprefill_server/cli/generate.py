"""`mlx-specprefill generate` and `inspect`. What answers is imported once the options have been read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..pair_settings import ONE_SHOT, make_settings
from .common import OptionError, ask_server, begin, choose_here, one_line_errors, options_of, read_text
from .options import ApiKey, Keep, KvBits, Level, PairOptions, PrefillStep, Question, Raw, Rule, Url, takes_pair

MODE_HELP = (
    "auto: sparse if that is predicted to save time, or above the pair's threshold where it has one; in full for "
    "questions about everything. sparse: whatever the length, if it can be."
)
PrefillMode = Literal["auto", "sparse", "full"]
_ENABLED: dict[PrefillMode, bool | None] = {"auto": None, "sparse": True, "full": False}


@takes_pair
def generate(
    prompt_file: Annotated[Path, typer.Option(help="A text file; - reads standard input.")],
    question: Question = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens in the answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    keep: Keep = None,
    rule: Rule = None,
    mode: Annotated[PrefillMode, typer.Option(help=MODE_HELP)] = "auto",
    raw: Raw = False,
    prefill_step: PrefillStep = None,
    kv_bits: KvBits = None,
    log_level: Level = "warning",
    *,
    models: PairOptions,
) -> None:
    """Answer one prompt and show the time of each stage: the answer on standard output, the rest on standard error."""
    begin(log_level)
    with one_line_errors():
        text = read_text(prompt_file)
        options = options_of(_ENABLED[mode], keep)
        chosen = choose_here(models)
        settings = make_settings(
            chosen,
            rule=rule,
            prefill_step=prefill_step,
            kv_bits=kv_bits,
            **ONE_SHOT,
        )
        work = import_module(".answering", __package__)
        prompt = work.CliPrompt(text, question, raw, options, max_tokens, temperature)
        work.answer(chosen, models.dtype, settings, prompt)


@takes_pair
def inspect(
    prompt_file: Annotated[Path | None, typer.Option(help="A text file; - reads standard input.")] = None,
    misses: Annotated[
        bool, typer.Option("--misses", help="Show instead why a running server read prompts again.")
    ] = False,
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    question: Question = None,
    keep: Keep = None,
    rule: Rule = None,
    raw: Raw = False,
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
        options = options_of(None, keep)
        chosen = choose_here(models)
        settings = make_settings(chosen, rule=rule, **ONE_SHOT)
        work = import_module(".answering", __package__)
        prompt = work.CliPrompt(text, question, raw, options)
        work.inspect(chosen, models.dtype, settings, prompt, dropped_too=show_dropped)


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
