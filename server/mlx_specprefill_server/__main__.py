"""The console command, also by `python -m mlx_specprefill_server`."""

import os
import sys
from importlib import import_module

SERVICE = "mlx-specprefill"  # the name under which launchd runs the service
_USAGE = 2  # the status of wrong options and settings


def main() -> None:
    """Run the console command. Ctrl-C during its imports shows no traceback.

    launchd starts what fails again and again, unlike systemd also after wrong options, which only a person can mend: to
    launchd these are no failure.
    """
    try:
        import_module(".cli", __package__).main()
    except KeyboardInterrupt:
        print("Aborted!", file=sys.stderr)
        sys.exit(130)
    except SystemExit as end:
        if end.code == _USAGE and os.environ.get("XPC_SERVICE_NAME") == SERVICE:
            raise SystemExit(0) from end
        raise


if __name__ == "__main__":
    main()
