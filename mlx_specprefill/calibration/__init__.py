"""Calibration of a pair, once, and stored: the heads of its draft, the fit of its estimates."""
