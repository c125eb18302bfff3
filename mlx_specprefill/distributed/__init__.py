"""Several processes that run one model together, on MLX's own distributed backends."""
