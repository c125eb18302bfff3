"""The server's settings: one typed object, filled from the environment (MLX_SPECPREFILL_*) and the command line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from mlx_specprefill import (
    DraftPlacement,
    EngineConfig,
    RuleName,
    Scope,
    SpecPrefillPolicy,
    SpeculationConfig,
    SpeculationName,
    WiredLimit,
    keep_pct,
)

ENV_PREFIX = "MLX_SPECPREFILL_"
ENGINE = EngineConfig()  # the source of the engine's defaults
_REMEMBERED_BYTES = 8 << 30  # bytes of disk space for the common beginnings of agents' prompts

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Densify = Literal["on", "off", "auto"]
StablePrompts = Literal["on", "off", "reasoning"]
ToolParser = Literal["hermes", "xml", "harmony", "mistral", "gemma", "glm", "native"]
ReasoningParser = Literal["think", "mistral", "gemma", "native"]


def _split_list(value: Any) -> Any:
    """Return two entries for `a,b` from the environment."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


UNITS = ("", "k", "m", "g", "t")
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)


def _size(value: Any) -> Any:
    """Return the bytes of `512MB`, `1.5 GiB`, `2g` or a number. KB is 1024 bytes like KiB: memory sizes are meant."""
    if not isinstance(value, str):
        return value
    parts = SIZE.fullmatch(value)
    if parts is None:
        raise ValueError(f"a size such as 512MB or 2GB is expected, got {value!r}")
    return int(Fraction(parts[1]) * 1024 ** UNITS.index(parts[2].lower()))


Size = Annotated[int, BeforeValidator(_size), Field(ge=0)]
KeepShare = Annotated[Fraction, BeforeValidator(keep_pct)]


class Settings(BaseSettings):
    """The settings, with their documented defaults."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="ignore", protected_namespaces=())

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    model_alias: str | None = None  # the id that /v1/models shows; default: the last part of the target's name
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split_list)] = ()
    # keys that see the data of all callers
    admin_keys: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split_list)] = ()
    share_cache: bool = Field(
        default=False,
        description="All API keys share one prompt cache. A key can then learn from timing what others asked.",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list)] = ()
    cors_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list)] = Field(
        default=(), description="Let pages of these origins call the server; *: any."
    )
    max_models: int | None = Field(default=None, ge=1)  # of several models, the number in memory
    strict_model: bool = Field(default=False, description="Answer 404 to requests that name another model.")
    draft_placement: DraftPlacement = "first"  # on several ranks: the draft on rank 0, or a part of it on each
    shutdown_grace_s: float = Field(
        default=30.0, ge=0, description="Seconds that running requests have to finish after SIGTERM."
    )
    request_timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds after which a request is cancelled."
    )
    queue_timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds that a request may wait in the queue."
    )
    max_requests_per_key: int | None = Field(
        default=None, ge=1, description="Largest number of running requests per API key."
    )
    log_level: LogLevel = "info"
    log_format: LogFormat = Field(
        default="text", description="Format of the log. text: lines. json: one object per line."
    )
    otel: bool = Field(default=False, description="Send OpenTelemetry traces and metrics, as the OTEL_* variables say.")
    tool_parser: ToolParser | None = Field(
        default=None, description="Format of the model's tool calls. Default: detected from its chat template."
    )
    reasoning_parser: ReasoningParser | None = Field(
        default=None, description="Format of its reasoning. Default: detected from its vocabulary and chat template."
    )
    allow_special_tokens: bool = False  # True: names of control tokens in messages are those tokens, not text
    stable_prompts: StablePrompts = Field(
        default="on",
        description="Keep prompts as they were. on: without known lines that change with each session, tools in their "
        "first order. reasoning: also with reasoning before tool calls that a client dropped. off: as they are sent.",
    )
    temperature: float = Field(
        default=0.0,
        ge=0,
        le=2,
        description="Temperature of requests that set none; if not set, as the model's generation_config.json says.",
    )
    specprefill: bool = ENGINE.policy.enabled  # False: sparse only when a request asks for it
    specprefill_threshold: int | None = Field(default=None, ge=0)  # tokens; None: measured, by predicted saving
    calibration_file: Path | None = Field(
        default_factory=lambda: Path.home() / ".cache/mlx-specprefill/costs.json",
        description="File of the models' measured costs, per pair. Calibrated heads are in `heads` beside it.",
    )
    specprefill_keep_pct: KeepShare = ENGINE.policy.keep_pct
    max_differ: float = Field(default=0.05, gt=0, lt=1)  # of answers at keep_pct "auto"
    specprefill_scope: Scope = ENGINE.policy.scope  # the default of a request's selection scope
    rule: RuleName = ENGINE.rule  # the default of a request's rule
    speculative: SpeculationName = ENGINE.speculation.strategy  # the default of a request's speculation
    prefill_step: int = Field(
        default_factory=lambda: ENGINE.prefill_step,
        ge=1,
        description="Tokens per prefill chunk: 2048 on a GPU, 128 on a CPU.",
    )
    max_rows: int = Field(default=ENGINE.max_rows, ge=1)
    target_itl_ms: float = Field(
        default=ENGINE.target_itl_ms, gt=0
    )  # milliseconds by which a prefill may delay running answers
    memory_limit: Annotated[int, BeforeValidator(_size), Field(gt=0)] | None = None
    wired_limit: WiredLimit = Field(
        default=ENGINE.wired_limit,
        description="Memory that macOS keeps resident. auto: the models, if they take more than 60 % of it.",
    )
    prefix_cache_size: Size = ENGINE.prefix_cache_bytes
    prefix_cache_dir: Path | None = None
    prefix_disk_size: Size = ENGINE.prefix_disk_bytes
    remember: bool = True  # system prompts and tools of agents outlive the server
    densify: Densify = "auto"
    kv_bits: int | None = None

    @property
    def heads_folder(self) -> Path | None:
        """The folder of the drafts' calibrated heads."""
        return None if self.calibration_file is None else self.calibration_file.parent / "heads"

    @property
    def promises_file(self) -> Path | None:
        """The file of what is known of answers at each share."""
        return None if self.calibration_file is None else self.calibration_file.parent / "promises.json"

    @property
    def remember_folder(self) -> Path | None:
        """The folder of system prompts and tools, if they are kept. A folder for all prefixes serves for them too."""
        kept = self.remember and self.prefix_cache_dir is None
        return self.calibration_file.parent / "prompts" if kept and self.calibration_file is not None else None

    @model_validator(mode="after")
    def _engine_agrees(self) -> Self:
        self.engine_config()
        return self

    def serving_config(self) -> EngineConfig:
        """Return the `engine_config` of a server, which pins the common beginnings of agents' prompts."""
        config, folder = self.engine_config(), self.remember_folder
        if folder is None:
            return config
        return replace(
            config,
            prefix_cache_dir=folder,
            prefix_cache_optional=True,
            prefix_disk_bytes=_REMEMBERED_BYTES,
            prefix_disk_pinned_only=True,
        )

    def engine_config(self) -> EngineConfig:
        """Return the engine's part of the settings."""
        return EngineConfig(
            rule=self.rule,
            policy=SpecPrefillPolicy(
                enabled=self.specprefill,
                threshold=self.specprefill_threshold,
                keep_pct=self.specprefill_keep_pct,
                densify=self.densify != "off",
                on_battery=self.densify == "on",
                scope=self.specprefill_scope,
            ),
            speculation=SpeculationConfig(strategy=self.speculative),
            prefill_step=self.prefill_step,
            max_rows=self.max_rows,
            target_itl_ms=self.target_itl_ms,
            memory_limit=self.memory_limit,
            wired_limit=self.wired_limit,
            prefix_cache_bytes=self.prefix_cache_size,
            prefix_cache_dir=self.prefix_cache_dir,
            prefix_disk_bytes=self.prefix_disk_size,
            kv_bits=self.kv_bits,
            calibration_file=self.calibration_file,
        )


def default_text(name: str) -> str:
    """Return the default of setting `name` in the form that people write."""
    value = Settings.model_fields[name].get_default(call_default_factory=True)
    if value in (None, ()):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Fraction):
        return f"{float(value):g}"
    if isinstance(value, int) and name.endswith(("_size", "_limit")) and value >= 1 << 10:
        return next(f"{value >> shift}{unit}" for shift, unit in ((30, "GB"), (20, "MB"), (10, "KB")) if value >> shift)
    return f"{value:g}" if isinstance(value, float) else str(value)


NOT_SETTINGS = ["BLAS", "CONTROL", "LAUNCHED", "RANK_KEY"]  # read by the library before the settings exist
_FLAGS = {
    "admin_keys": "--admin-key",
    "allowed_hosts": "--allowed-host",
    "api_keys": "--api-key",
}
_SECRET = {"admin_keys", "api_keys"}
_WORDS = {
    "int_parsing": "is not a whole number",
    "int_type": "is not a whole number",
    "int_from_float": "is not a whole number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "bool_parsing": "is neither true nor false",
    "bool_type": "is neither true nor false",
    "greater_than": "has to be above {gt}",
    "greater_than_equal": "has to be {ge} or more",
    "less_than_equal": "has to be {le} or less",
    "literal_error": "has to be one of {expected}",
}


def variable(name: str) -> str:
    """Return the environment variable of setting `name`."""
    return ENV_PREFIX + name.upper()


def flag_of(name: str) -> str:
    """Return the option of `serve` for setting `name`, None if it has none."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def what_is_wrong(error: ValidationError, environ: Mapping[str, str] | None = None) -> str:
    """Return the first mistake: the option or variable, its value, and the fault.

    What agrees with no single setting comes without a name, since its message has it.
    """
    first: Mapping[str, Any] = error.errors()[0]
    message = str(first["msg"]).removeprefix("Value error, ")
    template = _WORDS.get(first["type"])
    if not first["loc"]:
        return message
    name, value = str(first["loc"][0]), first["input"]
    given = dict(os.environ if environ is None else environ)
    where = variable(name) if given.get(variable(name)) == value else flag_of(name)
    if name in _SECRET:
        return f"{where} {message}"
    if template is None:
        return f"{where}: {message}"
    return f"{where}: {json.dumps(value, default=str)} {template.format(**_bounds(first.get('ctx', {})))}"


def _bounds(context: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in context.items()}


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Return variables that look like settings and are none, each with the nearest name, if one is near."""
    known = [name.upper() for name in Settings.model_fields] + NOT_SETTINGS
    given = {name: name.upper().removeprefix(ENV_PREFIX) for name in (os.environ if environ is None else environ)}
    strange = {name: end for name, end in sorted(given.items()) if end != name.upper() and end not in known}
    return {name: _nearest(end, known) for name, end in strange.items()}


def _nearest(end: str, known: Sequence[str]) -> str | None:
    """Return the nearest whole name. Only the part after the common beginning is compared."""
    return next((ENV_PREFIX + near for near in get_close_matches(end, known, 1)), None)
