"""What the request bodies of all dialects are made of."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from mlx_specprefill import RuleName, Scope, SpecPrefillOptions, SpeculationName, keep_pct

__all__ = ["Body", "Number", "SpecPrefillFields", "Texts", "TokenIds", "Whole"]

INT64 = 2**63


def _whole(value: Any) -> Any:
    """Some clients write 16.0 for 16."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < INT64 else value


def _no_nulls(body: Any) -> Any:
    return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


def _keep(value: Any) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number in (0, 1]")
    return keep_pct(value)


def _texts(value: Any) -> dict[str, str]:
    """pydantic would make an error for each wrong member."""
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("must be an object whose values are strings")
    return value


Share = Annotated[float, Field(gt=0, le=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=-INT64, lt=INT64)]
TokenIds = Annotated[list[Whole], Field(fail_fast=True)]
Texts = Annotated[dict[str, str], PlainValidator(_texts, json_schema_input_type=dict[str, str])]


class Body(BaseModel):
    """Strict types (no "1" for 1), unknown fields ignored, null means default."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, protected_namespaces=())

    _drop_nulls = model_validator(mode="before")(_no_nulls)


class SpecPrefillFields(Body):
    """The request's word on prefill, caching and drafted answers, the same on every endpoint that generates."""

    specprefill: bool | None = None
    specprefill_keep_pct: Annotated[Fraction, PlainValidator(_keep, json_schema_input_type=Share)] | None = None
    specprefill_return_spans: bool = False
    specprefill_rule: RuleName | None = None
    specprefill_scope: Scope | None = None
    speculative: SpeculationName | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None  # vLLM's

    def options(self) -> SpecPrefillOptions:
        """As the engine wants it."""
        return SpecPrefillOptions(
            self.specprefill,
            self.specprefill_keep_pct,
            self.specprefill_return_spans,
            self.specprefill_rule,
            speculative=self.speculative,
            scope=self.specprefill_scope,
        )
