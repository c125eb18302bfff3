"""Rendering of a conversation to tokens, and the places of its parts."""
