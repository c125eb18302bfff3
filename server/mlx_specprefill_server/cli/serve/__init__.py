"""The command `serve`: its options, its refusals, its work."""
