"""Waiting for what comes to be so a little later."""

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Return once `is_so` is; fail if it is not within so many seconds."""
    until_s = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until_s, "waited too long"
        time.sleep(0.01)
