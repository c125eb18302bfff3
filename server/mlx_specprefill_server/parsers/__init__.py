"""Parsers of a model's output: visible text, reasoning, tool calls. One format per file.

Parsers are pure: they take text as it is generated and return answer deltas. The joined deltas do not depend on how the
text was cut. Text that is not a well-formed call stays text, character for character.
"""
