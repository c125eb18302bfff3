"""The cached part of a prompt: looked up, stored, edited, forgotten, and why it is missing."""
