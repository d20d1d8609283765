"""How often a view looks into a run's folder: so seldom that looking takes at most a 200th of a core.

Example: after a look that computes for 10 ms the next is due 2 s later; after one of 30 ms 5 s later, for nobody wants
to wait longer than that.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

_COST = 1 / 200
"""How much of a core looking may take: the view may be drawn by a worker, or on the cores of all."""
_MOST_S = 5.0
"""Between two looks, whatever they cost."""


class Pace:
    """Says when the next look is due: `least_s` after the last at the earliest."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._due_s = -math.inf  # the clock may begin at 0 when the machine does

    @property
    def is_due(self) -> bool:
        """Whether it is time to look."""
        return time.monotonic() >= self._due_s

    @contextmanager
    def look(self) -> Iterator[None]:
        """Count what this thread computes in the `with` block as a look."""
        began_s = time.thread_time()
        yield
        spent_s = time.thread_time() - began_s
        self._due_s = time.monotonic() + min(_MOST_S, max(self._least_s, spent_s / _COST))
