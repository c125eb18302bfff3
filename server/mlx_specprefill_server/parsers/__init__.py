"""Parsers of a model's output: visible text, reasoning, tool calls. One format per file.

Parsers are pure: text goes in as it is generated, answer deltas come out, and no cutting of the text into chunks
changes what comes out, put together. What is not a well-formed call stays text, character for character.
"""
