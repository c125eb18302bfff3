"""The commands `connect` and `launch`: agents and their configurations."""
