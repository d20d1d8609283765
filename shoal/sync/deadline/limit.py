"""How long a step waits by itself, where the plan gives no deadline: by what the last steps took.

The median worker of the last 20 steps took so long for its gradient, from the end of the step before; whoever takes
more than 1.5 times that is late. The wait is counted from when the first worker is ready, so what the fastest took is
taken off. One that took more than 2.5 times as long as the median of the list that it was last on is not waited for at
all: it will be late again. The first 3 steps wait for all: they are slower than others, and not alike.

Example: gradients took 100, 100, 110 and 400 ms, step after step. The median is 100 ms (the lower, of an even number),
1.5 times that is 150 ms; the fastest took 100 ms, so a step waits for 50 ms after the first is ready. If the last was
on the list of the step before, with its 400 ms, the step goes on as soon as the other three are there.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

WINDOW = 20
WARM_UP = 3
SLOWER = 1.5
"""At 1.25, four workers on two busy cores that are all alike are taken for late now and then; a worker that is 4 times
slower than three others costs them 12% of every fourth step at 1.5."""
MUCH_SLOWER = 2.5
"""Far above SLOWER: a worker that was slow by chance, and is left out for it, idles for a step."""
LEAST_S = 0.005


class Limit:
    """The limit of the next step. Each worker has its own, by the lists that it has seen."""

    def __init__(self, deadline_s: float) -> None:
        """With a `deadline_s` above 0, the limit is always that."""
        self._deadline_s = deadline_s
        self._medians: deque[float] = deque(maxlen=WINDOW)
        self._fastest: deque[float] = deque(maxlen=WINDOW)

    def note(self, took_s: Sequence[float]) -> None:
        """Take in how long those on a list took for their gradients."""
        self._medians.append(statistics.median_low(took_s))
        self._fastest.append(min(took_s))

    def expected(self, took_s: Mapping[int, float]) -> set[int]:
        """Return for whom to wait among the workers who are current, by how long each took for its last gradient."""
        if self._deadline_s > 0 or len(self._medians) < WARM_UP:
            return set(took_s)
        median_s = statistics.median_low(took_s.values())
        return {worker for worker, s in took_s.items() if s <= max(MUCH_SLOWER * median_s, median_s + LEAST_S)}

    @property
    def seconds(self) -> float:
        """How long the next step waits after the first worker is ready; infinite while too little is known."""
        if self._deadline_s > 0:
            return self._deadline_s
        if len(self._medians) < WARM_UP:
            return math.inf
        return max(LEAST_S, SLOWER * statistics.median(self._medians) - statistics.median(self._fastest))
