"""Training code of the bundled demonstration models (see models/demo/README.md)."""
