"""The console command `mlx-specprefill`: serve, generate, inspect, calibrate, top, eval."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from mlx_specprefill import (
    BLAS,
    SPECULATION_NAMES,
    Engine,
    EngineClosedError,
    Failed,
    Finished,
    GenerationRequest,
    Inspection,
    ModelPair,
    Progress,
    SamplingParams,
    SpecPrefillError,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
    break_even,
    keep_pct,
    load_pair,
)
from mlx_specprefill import (
    calibrate as measure_pair,
)

from .app import serve as serve_forever
from .console import StageBars, chunk_table, cost_table, stage_bars, stage_summary, stage_table, work_table
from .conversation import conversation
from .evals.arms import ARM_KINDS
from .evals.arms import arms as eval_arms
from .evals.command import Options as EvalOptions
from .evals.command import evaluate as run_eval
from .evals.errors import EvaluationError
from .evals.local import LocalExaminee, examination
from .evals.remote import RemoteExaminee
from .explained import ExplainedChunk, explain_chunks
from .heatmap import render_heatmap
from .logs import set_up as set_up_logs
from .pairs import Pair, PairsError, find_pair
from .prompt import Prompt, PromptBuilder
from .settings import Settings
from .top import StatsReader, show_once, watch

__all__ = ["app", "main"]

USAGE_ERROR = 2  # the exit status of everything the user can put right
FAILED = 1
ONE_SHOT: dict[str, Any] = {"prefix_cache_size": 0, "densify": False}  # no next request will use what is kept
ONE_SHOT_THRESHOLD = 8192  # tokens; measuring takes longer than one request saves

app = typer.Typer(
    name="mlx-specprefill",
    help="Serve long prompts with SpecPrefill over MLX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Forced(StrEnum):
    template = "template"
    last_token = "last-token"


class PrefillMode(StrEnum):
    auto = "auto"
    sparse = "sparse"
    full = "full"


class CallFormat(StrEnum):
    hermes = "hermes"
    xml = "xml"
    harmony = "harmony"
    mistral = "mistral"
    gemma = "gemma"
    glm = "glm"
    native = "native"


class ReasoningFormat(StrEnum):
    think = "think"
    mistral = "mistral"
    gemma = "gemma"
    native = "native"


Speculative = StrEnum("Speculative", [(name, name) for name in SPECULATION_NAMES])  # type: ignore[misc]


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class LogFormat(StrEnum):
    text = "text"
    json = "json"


PairName = Annotated[str, typer.Option("--pair", help="A pair named in models/pairs.toml.")]
PairsFile = Annotated[Path | None, typer.Option("--pairs-file", help="Another file of named pairs.")]
Target = Annotated[str | None, typer.Option(help="Folder or repository id of the target, instead of --pair.")]
Draft = Annotated[str | None, typer.Option(help="Folder or repository id of the draft; none: full prefill only.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="auto: as stored on a GPU, float32 on a CPU.")]
ForcedOption = Annotated[Forced, typer.Option("--forced", help="Which tokens are always kept.")]
PrefillStep = Annotated[int | None, typer.Option(help="Tokens per target forward.")]
KvBits = Annotated[int | None, typer.Option(help="Quantise the target's KV cache after prefill: 2, 3, 4, 5, 6 or 8.")]
PromptFile = Annotated[Path, typer.Option("--prompt-file", help="A text file; - reads standard input.")]
InspectedFile = Annotated[Path | None, typer.Option("--prompt-file", help="A text file; - reads standard input.")]
Question = Annotated[str | None, typer.Option(help="Put after the file's text, in the same user message.")]
KeepPct = Annotated[str | None, typer.Option("--keep-pct", help="Share of chunks to keep, in (0, 1].")]
Raw = Annotated[bool, typer.Option("--raw", help="No chat template: the text itself is the prompt.")]
LogLevelOption = Annotated[LogLevel, typer.Option("--log-level")]


@app.command()
def serve(
    pair: PairName = "demo",
    pairs_file: PairsFile = None,
    target: Target = None,
    draft: Draft = None,
    host: Annotated[str | None, typer.Option(help="Default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Default 8000.")] = None,
    dtype: DtypeOption = Dtype.auto,
    specprefill_threshold: Annotated[
        int | None,
        typer.Option(
            help="Prompts with more uncached tokens than this are prefilled sparsely. Default: where it saves enough, "
            "by times measured at the first start."
        ),
    ] = None,
    specprefill_keep_pct: Annotated[str | None, typer.Option(help="Share of chunks to keep. Default 0.2.")] = None,
    no_specprefill: Annotated[bool, typer.Option("--no-specprefill", help="Sparse only when a request asks.")] = False,
    forced: Annotated[Forced | None, typer.Option("--forced", help="Which tokens are always kept.")] = None,
    speculative: Annotated[
        Speculative | None,
        typer.Option(
            help="How answers are drafted: auto where it is measured to pay, or one way by name. Default off."
        ),
    ] = None,
    prefill_step: PrefillStep = None,
    max_rows: Annotated[int | None, typer.Option(help="Requests that run at the same time. Default 32.")] = None,
    target_itl_ms: Annotated[
        float | None, typer.Option(help="Milliseconds by which a prefill may delay a running answer. Default 200.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="For weights, requests and caches, as 48GB. Default: what the device recommends.")
    ] = None,
    prefix_cache_size: Annotated[
        str | None, typer.Option(help="Memory for reusable prompt prefixes, 0: none. Default 2GB.")
    ] = None,
    prefix_cache_dir: Annotated[
        Path | None, typer.Option(help="Folder in which prefixes outlive the server. Default: none.")
    ] = None,
    prefix_disk_size: Annotated[str | None, typer.Option(help="Disk space for that folder. Default 20GB.")] = None,
    no_densify: Annotated[
        bool, typer.Option("--no-densify", help="Never prefill in full, in idle time, what was prefilled sparsely.")
    ] = False,
    kv_bits: KvBits = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Require this key; repeat for more.")] = None,
    model_alias: Annotated[str | None, typer.Option(help="The model id that clients see.")] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Answer to this Host name too; repeat for more, *: any.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Let pages of this origin call the server; repeat for more, *: any.")
    ] = None,
    strict_model: Annotated[
        bool, typer.Option("--strict-model", help="404 for requests that name another model. Default: any name.")
    ] = False,
    log_level: Annotated[LogLevel | None, typer.Option("--log-level", help="Default info.")] = None,
    log_format: Annotated[LogFormat | None, typer.Option("--log-format", help="Default text.")] = None,
    otel: Annotated[
        bool, typer.Option("--otel", help="OpenTelemetry traces and metrics, to where the OTEL_* variables say.")
    ] = False,
    tool_parser: Annotated[
        CallFormat | None, typer.Option(help="How the model writes tool calls. Default: as its chat template says.")
    ] = None,
    reasoning_parser: Annotated[
        ReasoningFormat | None, typer.Option(help="How it marks reasoning. Default: as its vocabulary says.")
    ] = None,
) -> None:
    """Start the OpenAI-compatible server. Every setting also has an environment variable, MLX_SPECPREFILL_*."""
    _note_blas()
    with _one_line_errors():
        chosen = _choose(pair, pairs_file, target, draft)
        settings = _settings(
            host=host,
            port=port,
            specprefill=False if no_specprefill else None,
            specprefill_threshold=specprefill_threshold,
            speculative=None if speculative is None else speculative.value,
            specprefill_keep_pct=specprefill_keep_pct,
            forced_rule=forced and forced.value,
            prefill_step=prefill_step,
            max_rows=max_rows,
            target_itl_ms=target_itl_ms,
            memory_limit=memory_limit,
            prefix_cache_size=prefix_cache_size,
            prefix_cache_dir=prefix_cache_dir,
            prefix_disk_size=prefix_disk_size,
            densify=False if no_densify else None,
            kv_bits=kv_bits,
            api_keys=tuple(api_key) if api_key else None,
            model_alias=model_alias,
            allowed_hosts=tuple(allowed_host) if allowed_host else None,
            cors_origins=tuple(cors_origin) if cors_origin else None,
            strict_model=strict_model or None,
            log_level=log_level and log_level.value,
            log_format=log_format and log_format.value,
            otel=otel or None,
            tool_parser=tool_parser and tool_parser.value,
            reasoning_parser=reasoning_parser and reasoning_parser.value,
            defaults=chosen,
        )
        set_up_logs(settings.log_level, settings.log_format)
        with Engine(_load(chosen, dtype), settings.engine_config()) as engine:
            serve_forever(engine, settings)


@app.command()
def generate(
    prompt_file: PromptFile,
    question: Question = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    keep: KeepPct = None,
    mode: Annotated[PrefillMode, typer.Option(help="auto: sparse above the pair's threshold.")] = PrefillMode.auto,
    raw: Raw = False,
    pair: PairName = "demo",
    pairs_file: PairsFile = None,
    target: Target = None,
    draft: Draft = None,
    dtype: DtypeOption = Dtype.auto,
    forced: ForcedOption = Forced.template,
    prefill_step: PrefillStep = None,
    kv_bits: KvBits = None,
    log_level: LogLevelOption = LogLevel.warning,
) -> None:
    """Answer one prompt and show where the time went: the answer on standard output, the rest on standard error."""
    _begin(log_level)
    with _one_line_errors():
        text = _read(prompt_file)
        options = _options(mode, keep)
        chosen = _choose(pair, pairs_file, target, draft)
        settings = _settings(
            forced_rule=forced.value,
            prefill_step=prefill_step,
            kv_bits=kv_bits,
            defaults=chosen,
            one_shot=True,
            **ONE_SHOT,
        )
        with Engine(_load(chosen, dtype), settings.engine_config()) as engine:
            prompt = _prompt(engine.pair, text, question, raw)
            request = GenerationRequest(
                prompt.tokens,
                max_tokens,
                SamplingParams(temperature=temperature),
                options,
                spans=prompt.spans,
                stop_token_ids=engine.pair.eos_token_ids,
            )
            _answer(engine, request)


@app.command()
def inspect(
    prompt_file: InspectedFile = None,
    question: Question = None,
    keep: KeepPct = None,
    raw: Raw = False,
    shape: Annotated[
        str | None, typer.Option(help="Instead of a prompt: what a prefill computes in this model shape.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a heat map of the prompt to this file.")] = None,
    show_dropped: Annotated[bool, typer.Option("--all", help="List the dropped chunks too.")] = False,
    pair: PairName = "demo",
    pairs_file: PairsFile = None,
    target: Target = None,
    draft: Draft = None,
    dtype: DtypeOption = Dtype.auto,
    forced: ForcedOption = Forced.template,
    log_level: LogLevelOption = LogLevel.warning,
) -> None:
    """Show which chunks of a prompt the draft would keep, and why, without running the target on it."""
    _begin(log_level)
    with _one_line_errors():
        if shape is not None:
            Console().print(work_table(shape, keep_pct(keep or "0.2", "--keep-pct")))
            return
        if prompt_file is None:
            raise PairsError("--prompt-file or --shape is needed")
        text = _read(prompt_file)
        options = _options(PrefillMode.auto, keep)
        chosen = _choose(pair, pairs_file, target, draft)
        settings = _settings(forced_rule=forced.value, defaults=chosen, one_shot=True, **ONE_SHOT)
        with Engine(_load(chosen, dtype), settings.engine_config()) as engine:
            prompt = _prompt(engine.pair, text, question, raw)
            inspection = _inspect(engine, GenerationRequest(prompt.tokens, 1, specprefill=options, spans=prompt.spans))
            chunks = explain_chunks(engine.pair.tokenizer, prompt.tokens, inspection)
            _show(inspection, chunks, dropped_too=show_dropped)
            if html is not None:
                html.write_text(render_heatmap(inspection, chunks, _names(engine.pair)), encoding="utf-8")
                _notes().print(f"Heat map written to {html}", markup=False)


@app.command()
def calibrate(
    keep: KeepPct = None,
    pair: PairName = "demo",
    pairs_file: PairsFile = None,
    target: Target = None,
    draft: Draft = None,
    dtype: DtypeOption = Dtype.auto,
    log_level: LogLevelOption = LogLevel.warning,
) -> None:
    """Measure target and draft on this machine, and show from which length on a sparse prefill pays."""
    _begin(log_level)
    with _one_line_errors():
        chosen = _choose(pair, pairs_file, target, draft)
        config = _settings(specprefill_keep_pct=keep, defaults=chosen).engine_config()
        loaded = _load(chosen, dtype)
        with _notes().status("Measuring"):
            cost = measure_pair(loaded, config)
        longest = min(loaded.context_length, loaded.draft_context or loaded.context_length)
        Console().print(cost_table(cost, config.policy, longest))
        typer.echo(_break_even_text(break_even(cost, config.policy, longest), config.policy))


@app.command("eval")
def evaluate(
    tasks: Annotated[
        list[str] | None, typer.Option("--task", help="A task or a group: ruler, adversarial, more, all; repeat.")
    ] = None,
    lengths: Annotated[list[int] | None, typer.Option("--length", help="Prompt tokens; repeat. Default 1024.")] = None,
    depths: Annotated[
        list[float] | None, typer.Option("--depth", help="Place of a needle in [0, 1]; repeat. Default: anywhere.")
    ] = None,
    longbench: Annotated[list[Path] | None, typer.Option(help="A LongBench jsonl file; repeat.")] = None,
    number: Annotated[int, typer.Option("-n", min=1, help="Items per task, length and depth.")] = 20,
    arms: Annotated[
        list[str] | None, typer.Option("--arm", help=f"{', '.join(ARM_KINDS)}; repeat. Default: sparse, random.")
    ] = None,
    keeps: Annotated[list[str] | None, typer.Option("--keep", help="Share of chunks; repeat. Default 0.2.")] = None,
    probes: Annotated[
        int,
        typer.Option(min=0, help="Items per cell whose distributions are measured too: KL, attention, perplexity."),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Number of the first item.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for items, report and plots; a run into the same folder goes on.")
    ] = None,
    server: Annotated[str | None, typer.Option(help="Ask the server at this address; no pair is loaded.")] = None,
    model: Annotated[str | None, typer.Option(help="Model of that server. Default: the first it lists.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Of that server.")] = None,
    pair: PairName = "demo",
    pairs_file: PairsFile = None,
    target: Target = None,
    draft: Draft = None,
    dtype: DtypeOption = Dtype.auto,
    log_level: LogLevelOption = LogLevel.warning,
) -> None:
    """Measure what sparse prefill keeps and loses on tasks with known answers. The last line is the report as JSON."""
    _begin(log_level)
    with _one_line_errors():
        options = EvalOptions(
            tasks=tuple(tasks or () if longbench else tasks or ("niah_single_2",)),
            lengths=tuple(lengths or (1024,)),
            depths=tuple(depths or ()),
            files=tuple(longbench or ()),
            arms=eval_arms(arms or ["sparse"] + ([] if server else ["random"]), keeps or ["0.2"]),
            number=number,
            probes=probes,
            seed=seed,
            out=out,
        )
        if server is not None:
            typer.echo(json.dumps(run_eval(options, RemoteExaminee(server, model, api_key), _tell)))
            return
        chosen = _choose(pair, pairs_file, target, draft)
        with Engine(_load(chosen, dtype), examination()) as engine:
            typer.echo(json.dumps(run_eval(options, LocalExaminee(engine), _tell)))


@app.command()
def top(
    url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="MLX_SPECPREFILL_API_KEY", help="If the server asks for one.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the numbers once and end.")] = False,
) -> None:
    """Watch a running server: what it does, where its memory goes, what its last answers cost."""
    with _one_line_errors():
        reader = StatsReader(url, api_key)
        if once:
            show_once(reader, Console())
            return
        with suppress(KeyboardInterrupt):
            watch(reader, Console(), interval)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _break_even_text(found: int | None, policy: SpecPrefillPolicy) -> str:
    margins = f"saves {float(policy.min_saving_share):.0%} and {policy.min_saving_ms / 1e3:g} s"
    if found is None:
        return f"No prompt that fits the context {margins} at keep {float(policy.keep_pct):g}."
    return f"At keep {float(policy.keep_pct):g} a sparse prefill {margins} from {found:,} uncached tokens on."


def main() -> None:
    """The console command."""
    app(prog_name="mlx-specprefill")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """What the user did wrong, in one line; everything else keeps its traceback."""
    try:
        yield
    except (SpecPrefillError, PairsError, EvaluationError) as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
    else:
        return
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(USAGE_ERROR)


def _begin(level: LogLevel) -> None:
    set_up_logs(level.value)
    _note_blas()


def _note_blas() -> None:
    if BLAS.notice:
        typer.echo(f"note: {BLAS.notice}", err=True)


def _notes() -> Console:
    """Everything that is not the answer."""
    return Console(stderr=True)


def _choose(name: str, pairs_file: Path | None, target: str | None, draft: str | None) -> Pair:
    if target is not None:
        return Pair(target=target, draft=draft)
    if draft is not None:
        raise PairsError("--draft needs --target")
    return find_pair(name, pairs_file)


def _settings(*, defaults: Pair, one_shot: bool = False, **given: Any) -> Settings:
    """Options first, then the environment, then the pair's own values, then the built-in defaults."""
    options = {name: value for name, value in given.items() if value is not None}
    known = Settings(**options).model_fields_set
    pair_says = {
        "specprefill_threshold": ONE_SHOT_THRESHOLD if one_shot and defaults.threshold is None else defaults.threshold,
        "specprefill_keep_pct": defaults.keep_pct,
        "model_alias": defaults.alias,
    }
    for name, value in pair_says.items():
        if value is not None and name not in known:
            options[name] = value
    return Settings(**options)


def _options(mode: PrefillMode, keep: str | None) -> SpecPrefillOptions:
    enabled = {PrefillMode.auto: None, PrefillMode.sparse: True, PrefillMode.full: False}[mode]
    return SpecPrefillOptions(enabled, None if keep is None else keep_pct(keep, "--keep-pct"))


def _load(chosen: Pair, dtype: Dtype) -> ModelPair:
    names = chosen.target if chosen.draft is None else f"{chosen.target} and {chosen.draft}"
    with _notes().status(f"Loading {names}"):
        return load_pair(chosen.target, chosen.draft, dtype=dtype.value)


def _names(pair: ModelPair) -> str:
    return f"target {pair.target_id}, draft {pair.draft_id or 'none'}"


def _read(path: Path) -> str:
    """The file's text; undecodable bytes become replacement characters."""
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    return data.decode("utf-8", errors="replace")


def _prompt(pair: ModelPair, text: str, question: str | None, raw: bool) -> Prompt:
    whole = text if question is None else f"{text.rstrip()}\n\n{question}"
    builder = PromptBuilder(pair.tokenizer)
    work = builder.raw(whole) if raw else builder.chat(conversation([{"role": "user", "content": whole}]))
    return asyncio.run(work)


def _answer(engine: Engine, request: GenerationRequest) -> None:
    console = _notes()
    with stage_bars(console) as bars:
        last = _stream(engine, request, bars)
    typer.echo()
    if isinstance(last, Failed):
        typer.echo(f"error: {last.error}", err=True)
        raise typer.Exit(FAILED)
    console.print(stage_table(last.account, last.completion_tokens))
    console.print(stage_summary(last.account, last.completion_tokens), markup=False, highlight=False)


def _stream(engine: Engine, request: GenerationRequest, bars: StageBars) -> Finished | Failed:
    """Write the answer as it comes; the request's last event."""
    text = engine.pair.tokenizer.detokenizer
    for event in engine.generate(request):
        match event:
            case Progress():
                bars.update(event)
            case TokenEvent() if event.token not in request.stop_token_ids:
                bars.stop()
                text.add_token(event.token)
                typer.echo(text.last_segment, nl=False)
            case Finished() | Failed():
                text.finalize()
                typer.echo(text.last_segment, nl=False)
                return event
    raise EngineClosedError("the engine stopped before the answer was complete")


def _inspect(engine: Engine, request: GenerationRequest) -> Inspection:
    with stage_bars(_notes()) as bars:
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
