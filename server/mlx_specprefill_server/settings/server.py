"""The server's settings with their defaults, from the environment (MLX_SPECPREFILL_*) and the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from mlx_specprefill import (
    EngineConfig,
    RuleName,
    Scope,
    SpecPrefillPolicy,
    SpeculationConfig,
    SpeculationName,
    Temperature,
    WiredLimit,
    keep_pct,
)

from ..notations import NOTATIONS, THINK_TAGS
from . import values

ENV_PREFIX = "MLX_SPECPREFILL_"
API_KEY_VARIABLE = f"{ENV_PREFIX}API_KEY"  # of clients: the key that they send
ENGINE = EngineConfig(prefill_step=1)  # the source of the defaults, but for the one that depends on the device
_REMEMBERED_BYTES = 8 << 30  # bytes of disk space for the common beginnings of agents' prompts

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Densify = Literal["on", "off", "auto"]
if TYPE_CHECKING:
    ToolParser = str
    ReasoningParser = str
else:
    ToolParser = Literal[(*NOTATIONS, "native")]
    ReasoningParser = Literal[(*THINK_TAGS, "native")]


Size = Annotated[int, BeforeValidator(values.size), Field(ge=0)]
Keys = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(values.keys)]
Kwargs = Annotated[dict[str, Any], NoDecode, BeforeValidator(values.template_kwargs)]
Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(values.split_list)]

NOT_SETTINGS = ["BLAS"]  # read by the library before the settings exist
_FLAGS = {
    "admin_keys": "--admin-key",
    "allowed_hosts": "--allowed-host",
    "api_keys": "--api-key",
    "specprefill_keep_pct": "--keep-pct",  # as other commands call it
}
SECRETS = ("admin_keys", "api_keys")


class _Environment(EnvSettingsSource):
    """The environment. A setting has a variable for each of `variables`."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        found, key, is_complex = super().get_field_value(field, field_name)
        given = (self.env_vars.get(name.lower()) for name in variables(field_name))
        return (next((value for value in given if value is not None), found), key, is_complex)


class Settings(BaseSettings):
    """The settings, with their documented defaults."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="ignore", protected_namespaces=())

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0: any free port.")
    model_alias: str | None = Field(
        default=None, description="Model id that clients see. Default: the last part of the target's name."
    )
    api_keys: Keys = Field(default=(), description="Require this API key; repeat for more.")
    admin_keys: Keys = Field(
        default=(), description="API key that also sees the cached prompts of the other keys; repeat for more."
    )
    allowed_hosts: Texts = Field(default=(), description="Further allowed Host name; repeat for more; *: any.")
    cors_origins: Texts = Field(default=(), description="Let pages of these origins call the server; *: any.")
    max_models: int | None = Field(
        default=None,
        ge=1,
        description="Largest number of the table's models in memory. Default: as many as fit.",
    )
    strict_model: bool = Field(default=False, description="Answer 404 to requests that name another model.")
    max_requests_per_key: int | None = Field(
        default=None, ge=1, description="Largest number of running requests per API key."
    )
    log_level: LogLevel = Field(default="info", description="Lowest level that is logged.")
    log_format: LogFormat = Field(
        default="text", description="Format of the log. text: lines. json: one object per line."
    )
    tool_parser: ToolParser | None = Field(
        default=None, description="Format of the model's tool calls. Default: detected from its chat template."
    )
    reasoning_parser: ReasoningParser | None = Field(
        default=None, description="Format of its reasoning. Default: detected from its vocabulary and chat template."
    )
    template_kwargs: Kwargs = Field(
        default_factory=dict,
        description="Arguments of the chat template, as a JSON object, for requests that don't set them. Default: "
        "those that keep the thoughts of finished turns, where the template has any.",
    )
    temperature: Temperature = Field(
        default=0.0,
        description="Temperature of requests that set none; if not set, as the model's generation_config.json says.",
    )
    specprefill: bool = Field(
        default=ENGINE.policy.enabled, description="Prefill long prompts sparsely. Off: only on request."
    )
    specprefill_threshold: int | None = Field(
        default=None,
        ge=0,
        description="Prefill prompts with more uncached tokens than this sparsely, unless costs measured on this "
        "machine say that it saves no time. Default: if it saves enough time, by learnt costs.",
    )
    calibration_file: Path | None = Field(
        default_factory=lambda: Path.home() / ".cache/mlx-specprefill/costs.json",
        description="File of the models' measured costs, per pair. Calibrated heads are in `heads` beside it.",
    )
    specprefill_keep_pct: Annotated[Fraction, BeforeValidator(keep_pct)] = Field(
        default=ENGINE.policy.keep_pct, description="Share of chunks to keep, in (0, 1]."
    )
    specprefill_scope: Scope = Field(
        default=ENGINE.policy.scope,
        description="Text that may be dropped. user: user text only. all: also the middle of a long system prompt.",
    )
    estimate: bool = Field(
        default=ENGINE.policy.estimate,
        description="Estimate the keys and values of as many tokens as the target reads, those that rank next. A pair "
        "without a map for it gets one in idle time, for the next start.",
    )
    rule: RuleName = Field(
        default=ENGINE.rule,
        description="Rule that scores and selects tokens. default: calibrated heads. paper: as SpecPrefill was "
        "published.",
    )
    speculative: SpeculationName = Field(
        default=ENGINE.speculation.strategy, description="Strategy of speculative decoding."
    )
    memory_limit: Annotated[int | None, BeforeValidator(values.size)] = Field(
        default=None,
        gt=0,
        description="Memory for weights, requests and caches, like 48GB. Default: the recommendation of the device.",
    )
    wired_limit: WiredLimit = Field(
        default=ENGINE.wired_limit,
        description="Memory that macOS keeps resident. auto: the models, from macOS 15 on.",
    )
    prefix_cache_size: Annotated[int | None, BeforeValidator(values.size)] = Field(
        default=None,
        ge=0,
        description="Memory for reusable prompt prefixes; 0: none. Default: a quarter of what the models and a request "
        "of 32K tokens leave, at least 2 GB.",
    )
    prefix_cache_dir: Path | None = Field(
        default=None, description="Folder that keeps prefixes when the server stops. Default: none."
    )
    prefix_disk_size: Size = Field(default=ENGINE.prefix_disk_bytes, description="Disk space for that folder.")
    remember: bool = Field(
        default=True, description="Keep shared system prompts and tools on disk, readable by this user only."
    )
    densify: Densify = Field(
        default="auto",
        description="Prefill sparse prompts in full in idle time. auto: not on battery.",
    )
    reuse: bool = Field(
        default=True,
        description="Keep what follows an edit of a cached prompt, and read a part of it anew.",
    )
    kv_bits: int | None = Field(
        default=None, description="Quantise the target's KV cache after prefill: 2, 3, 4, 5, 6 or 8."
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources: what is given, then the environment."""
        return init_settings, _Environment(settings_cls)

    def beside_costs(self, name: str) -> Path | None:
        """Return a path beside the file of costs, None without one."""
        return None if self.calibration_file is None else self.calibration_file.parent / name

    @model_validator(mode="after")
    def _engine_agrees(self) -> Self:
        self.engine_config()
        return self

    def serving_config(self) -> EngineConfig:
        """Return the `engine_config` of a server, which pins the common beginnings of agents' prompts."""
        config, folder = self.engine_config(), self.beside_costs("prompts")
        if folder is None or not self.remember or self.prefix_cache_dir is not None:  # one for all prefixes serves, too
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
                reuse=self.reuse,
                densify=self.densify != "off",
                on_battery=self.densify == "on",
                scope=self.specprefill_scope,
                estimate=self.estimate,
            ),
            speculation=SpeculationConfig(strategy=self.speculative),
            memory_limit=self.memory_limit,
            wired_limit=self.wired_limit,
            prefix_cache_bytes=self.prefix_cache_size,
            prefix_cache_dir=self.prefix_cache_dir,
            prefix_disk_bytes=self.prefix_disk_size,
            kv_bits=self.kv_bits,
            calibration_file=self.calibration_file,
            fits_folder=self.beside_costs("estimates"),
        )


def default_text(name: str) -> str:
    """Return the default of setting `name` in the form that people write."""
    value = Settings.model_fields[name].get_default(call_default_factory=True)
    if value in (None, (), {}):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Fraction):
        return f"{float(value):g}"
    if isinstance(value, int) and name.endswith(("_size", "_limit")) and value >= 1 << 10:
        return next(f"{value >> shift}{unit}" for shift, unit in ((30, "GB"), (20, "MB"), (10, "KB")) if value >> shift)
    return f"{value:g}" if isinstance(value, float) else str(value)


def description_of(name: str) -> str:
    """Return what setting `name` means, and its default."""
    text = Settings.model_fields[name].description or ""
    return text if "Default" in text else f"{text} Default {default_text(name)}."


def variable(name: str) -> str:
    """Return the environment variable of setting `name`."""
    return ENV_PREFIX + name.upper()


def variables(name: str) -> list[str]:
    """Return `variable(name)`, and the shorter ones that mean the same. A client's key is no key of the server's."""
    words = (name, flag_of(name).removeprefix("--").replace("-", "_"), name.removeprefix("specprefill_"))
    return [each for each in dict.fromkeys(map(variable, words)) if each != API_KEY_VARIABLE]


def flag_of(name: str) -> str:
    """Return the option of `serve` for setting `name`. Not every setting has one."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def what_is_wrong(error: ValidationError, environ: Mapping[str, str] | None = None) -> str:
    """Return the first mistake: the option or variable, the fault, and its value.

    What agrees with no single setting comes without a name, since its message has it.
    """
    first: Mapping[str, Any] = error.errors()[0]
    message = str(first["msg"]).removeprefix("Value error, ")
    if not first["loc"]:
        return message
    name, value = str(first["loc"][0]), first["input"]
    given = os.environ if environ is None else environ
    where = next((each for each in variables(name) if given.get(each) == value), flag_of(name))
    is_shown = name not in SECRETS and first["type"] != "value_error"
    return f"{where}: {message}" + (f" (got {json.dumps(value, default=str)})" if is_shown else "")


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a sentence for each variable that looks like a setting and is none, with the nearest name."""
    known = [each.removeprefix(ENV_PREFIX) for name in Settings.model_fields for each in variables(name)] + NOT_SETTINGS
    given = {name: name.upper().removeprefix(ENV_PREFIX) for name in (os.environ if environ is None else environ)}
    strange = {name: end for name, end in sorted(given.items()) if end != name.upper() and end not in known}
    near = {name: "".join(get_close_matches(end, known, 1)) for name, end in strange.items()}
    return [
        f"the environment variable {name} is no setting" + (f"; did you mean {ENV_PREFIX}{other}?" if other else "")
        for name, other in near.items()
    ]
