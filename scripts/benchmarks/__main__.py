"""python -m benchmarks NAME [options]"""

import signal
import sys

from .harness.command import main

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers of a benchmark end with it
sys.exit(main(sys.argv[1:]))
