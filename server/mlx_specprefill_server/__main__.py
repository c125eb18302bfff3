"""`python -m mlx_specprefill_server` is the console command."""

from .cli import main

main()
