"""Monitoring for operators: metrics, logs, recent requests."""
