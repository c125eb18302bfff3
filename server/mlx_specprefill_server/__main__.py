"""Run the console command by `python -m mlx_specprefill_server`."""

from .cli import main

main()
