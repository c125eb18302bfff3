"""How much a model may think before it answers: the fields of several dialects for it, understood in all of them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from .fields import Body, Whole

__all__ = ["Reasoning", "Thinking", "ThinkingFields"]

KINDS = {"enabled": True, "adaptive": True, "disabled": False}

Budget = Annotated[Whole, Field(ge=0)]


class Reasoning(Body):
    """As OpenAI's responses have it, and OpenRouter's chat completions."""

    effort: str | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None


class Thinking(Body):
    """As Anthropic has it, and others after it."""

    type: str = ""
    budget_tokens: Budget | None = None


class ThinkingFields(Body):
    reasoning: Reasoning = Reasoning()
    thinking: Thinking = Thinking()

    def thinking_budget(self) -> int | None:
        """Tokens; None: no limit of its own."""
        asked = self.reasoning.max_tokens
        return self.thinking.budget_tokens if asked is None else asked

    def thinking_kwargs(self, effort: str | None = None) -> dict[str, Any]:
        """How templates call this. Effort "none" turns thinking off; unknown kinds leave it to the template."""
        kwargs: dict[str, Any] = {}
        enabled = KINDS.get(self.thinking.type, self.reasoning.enabled)
        effort = effort or self.reasoning.effort
        if effort == "none":
            enabled = False
        elif effort is not None:
            kwargs["reasoning_effort"] = effort
        return kwargs if enabled is None else {"enable_thinking": enabled, **kwargs}
