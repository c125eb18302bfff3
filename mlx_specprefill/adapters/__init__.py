"""Everything that depends on a model's code: architectures, wrappers of mlx and mlx-lm, tokenizers."""
