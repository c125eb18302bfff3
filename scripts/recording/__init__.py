"""What `scripts/record_agent` runs: a real agent whose requests are written down on their way to a server."""
