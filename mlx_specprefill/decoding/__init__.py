"""From a prefilled sequence to tokens."""
