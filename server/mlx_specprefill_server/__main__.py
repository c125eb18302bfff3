"""The console command, also by `python -m mlx_specprefill_server`."""

import sys
from importlib import import_module


def main() -> None:
    """Run the console command. Ctrl-C during its imports shows no traceback."""
    try:
        import_module(".cli", __package__).main()
    except KeyboardInterrupt:
        print("Aborted!", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
