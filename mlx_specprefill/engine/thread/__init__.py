"""The MLX thread: its inbox, its loop, idle work, errors of the device."""
