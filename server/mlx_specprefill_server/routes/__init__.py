"""Endpoints beside the dialects."""
