"""Monitoring for operators: metrics, the access log, recent requests."""
