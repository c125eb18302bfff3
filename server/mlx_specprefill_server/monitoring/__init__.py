"""What operators see: metrics, the access log, recent requests."""
