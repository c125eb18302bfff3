"""Anthropic's dialect: messages and token counts."""
