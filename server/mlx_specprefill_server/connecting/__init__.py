"""Configurations of agents for this server, and their place in files that people have written."""
