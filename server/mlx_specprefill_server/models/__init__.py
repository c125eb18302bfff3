"""The models of a server: the known ones, and their loading and unloading."""
