"""The recorder behind `scripts/record_agent`: it writes down a real agent's requests on their way to a server."""
