"""Looking for what others change, often at first and then more and more seldom.

Shared storage, and a controller of Slurm, serve everybody: hundreds of processes that look 50 times a second slow down
all others. So each wait is twice as long as the one before, up to a few seconds: what comes soon is seen soon, and what
takes a while is seen after at most twice that.
"""

import time


class Looks:
    """When to look again: at once, then after `soonest_s`, and each time after twice as long, up to `latest_s`."""

    def __init__(self, soonest_s: float, latest_s: float) -> None:
        self._soonest_s, self._latest_s = soonest_s, latest_s
        self._wait_s, self._due_s = soonest_s, time.monotonic()

    def is_due(self) -> bool:
        """Return whether it is time to look; if so, the caller looks, and the next time is later."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, self._latest_s)
        return True

    def left_s(self) -> float:
        """Return how long it is until then."""
        return max(0.0, self._due_s - time.monotonic())

    def begin_anew(self) -> None:
        """Look again at once, and often: something was found."""
        self._wait_s, self._due_s = self._soonest_s, time.monotonic()
