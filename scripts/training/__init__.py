"""Training code of the bundled demonstration models (see models/README.md)."""
