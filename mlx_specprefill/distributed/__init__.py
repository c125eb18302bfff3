"""Several processes that run one model together, over MLX's distributed backends."""
