"""How long a batch is waited for."""

import time
from collections.abc import Callable

Arriving = Callable[[], object]
"""Returns something that is another each time that a byte of what is read has arrived; see Staged.arriving."""
Check = Callable[[], None]
"""Raises where it is in vain to wait on, as when another worker is lost and all go on without it."""
_LOOK_S = 0.5


def never() -> None:
    """Let whoever waits wait on: nobody else is concerned."""


class Patience:
    """It lasts for `timeout_s`; of data that is still being staged, for as long as bytes of that arrive.

    Whoever reads such data waits for its parts, and after its own `timeout_s` reads them in place: that is within ours.
    Meanwhile `check` is called, and may raise.
    """

    def __init__(self, timeout_s: float, arriving: Arriving | None = None, *, check: Check = never) -> None:
        self.timeout_s, self._arriving, self._check = timeout_s, arriving, check

    def lasts(self, wait: Callable[[float], bool]) -> bool:
        """Return whether `wait(seconds)` was ever True."""
        if self._waits(wait):
            return True
        if self._arriving is None:
            return False
        arrived = self._arriving()
        while not self._waits(wait):
            before, arrived = arrived, self._arriving()
            if before == arrived:
                return False
        return True

    def _waits(self, wait: Callable[[float], bool]) -> bool:
        """Return whether `wait` was True within `timeout_s`."""
        until_s = time.monotonic() + self.timeout_s
        while not wait(max(0.0, min(_LOOK_S, until_s - time.monotonic()))):
            self._check()
            if time.monotonic() >= until_s:
                return False
        return True
