"""Constraints on an answer's form: tool choice, JSON schemas, and their grammars."""
