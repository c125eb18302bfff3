"""A self-test: tiny random models compute on this device what the library relies on, against the CPU in float32."""

from .checks import Check, check_device
from .times import ForwardTimes, forward_times, sync_ms

__all__ = ["Check", "ForwardTimes", "check_device", "forward_times", "sync_ms"]
