"""Chooses an answer's next token: sampling, penalties, grammars."""
