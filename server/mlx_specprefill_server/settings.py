"""The server's settings: one typed object, filled from the environment (MLX_SPECPREFILL_*) and by the command line."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from mlx_specprefill import EngineConfig, ForcedRule, SelectionConfig, SpecPrefillPolicy, keep_pct

__all__ = ["Settings"]


def _listed(value: Any) -> Any:
    """`a,b` from the environment means two entries."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


class Settings(BaseSettings):
    """What can be set, with the defaults that the documentation states."""

    model_config = SettingsConfigDict(
        env_prefix="MLX_SPECPREFILL_", frozen=True, extra="ignore", protected_namespaces=()
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    model_alias: str | None = None  # the id that /v1/models shows; default: the last part of the target's name
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_listed)] = ()
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)] = ()
    body_limit: int = Field(default=32 * 2**20, gt=0)  # bytes of one request body
    keep_alive_s: float = Field(default=5.0, gt=0)  # silence in a stream before a comment is sent
    stale_after_s: float = Field(default=600.0, gt=0)  # heartbeat age at which /health turns to 503
    shutdown_grace_s: int = Field(default=10, ge=0)  # time that open connections get to end after a signal
    temperature: float = Field(default=0.0, ge=0, le=2)  # when a request names none
    specprefill: bool = True  # False: sparse only when a request asks for it
    specprefill_threshold: int = Field(default=8192, ge=0)
    specprefill_keep_pct: Annotated[Fraction, BeforeValidator(keep_pct)] = Fraction(1, 5)
    forced_rule: ForcedRule = "template"
    prefill_step: int = 2048
    max_queue: int = 256
    kv_bits: int | None = None

    @model_validator(mode="after")
    def _engine_agrees(self) -> Self:
        self.engine_config()
        return self

    def engine_config(self) -> EngineConfig:
        """The part of the settings that the engine needs."""
        return EngineConfig(
            selection=SelectionConfig(forced=self.forced_rule),
            policy=SpecPrefillPolicy(
                enabled=self.specprefill, threshold=self.specprefill_threshold, keep_pct=self.specprefill_keep_pct
            ),
            prefill_step=self.prefill_step,
            max_queue=self.max_queue,
            kv_bits=self.kv_bits,
        )
