"""How long a launcher goes on watching workers of which some have ended."""

import time

from shoal.core.errors import PeerLost, Stopped

ECHO_S = 5.0
"""How long a worker may take to say why it failed, once others have noticed: it took 2 seconds on a busy machine."""
STOPPED = Stopped("").exit_code
"""That of a worker that has stopped in order."""


class Patience:
    """How long to go on watching: until all have ended or one has failed.

    After the echo of a failure a little longer; after a request to stop, or when one has stopped, for the notice.
    """

    def __init__(self, notice_s: float) -> None:
        self._notice_s = notice_s
        self._deadlines: dict[str, float] = {}

    def is_over(self, codes: list[int | None], *, is_asked: bool = False) -> bool:
        """Return whether there is nothing more to wait for from workers with these exit codes (None: it runs)."""
        if None not in codes or any(code not in (None, 0, PeerLost.exit_code, STOPPED) for code in codes):
            return True
        now_s = time.monotonic()
        if PeerLost.exit_code in codes:
            self._deadlines.setdefault("echo", now_s + ECHO_S)
        if is_asked or STOPPED in codes:
            self._deadlines.setdefault("notice", now_s + self._notice_s)
        return any(now_s > deadline for deadline in self._deadlines.values())
