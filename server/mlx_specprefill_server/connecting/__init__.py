"""Configurations of agents for this server: what they are, and how they get into files that people have written."""
