"""Tasks of one function that a pool is to run: which are next, which must be tried again, and who gets the results."""

import threading
from collections import deque
from collections.abc import Callable, Container, Mapping, MutableSequence, Sequence
from typing import Any

from shoal.tasks.outcome import Failure

Deliver = Callable[[Sequence[int], Sequence[Any], Mapping[int, Failure]], None]
"""Takes positions, the value of each, and the failures by position (their values mean nothing)."""

CHUNK_S = 0.02
"""Tasks are sent in chunks of about so long: sending one and hearing of it costs some 0.1 ms, so half a percent."""
SHORTEST_S = 1e-3
"""Less work than this is not worth another message."""
_NEW_WEIGHT = 0.5


def chunk_tasks(left: int, *, total: int, workers: int, task_s: float | None) -> int:
    """Return how many of `left` tasks to send a worker at once, where one takes `task_s`; None: not known yet.

    As many as take CHUNK_S, but at most half of an even share of what is left, so that all workers end together; and
    no fewer than take SHORTEST_S, but at most an even share of all. Example: of 10,000 tasks of 0.1 us, 2 workers get
    5,000 each; of 10,000 of 1 ms they get 20 at a time, and of the last 20, 5, 4, 3 ... 1.
    """
    if task_s is None:
        return 1
    task_s = max(task_s, 1e-9)
    most = min(-(-left // (2 * workers)), int(CHUNK_S / task_s))
    fewest = min(-(-total // workers), int(SHORTEST_S / task_s))
    return max(1, most, min(left, fewest))


class Batch:
    """The tasks: `items`, to which more may be appended while the pool works on them.

    `done_items()` are those whose tasks have left their results somewhere, also if the worker died then;
    `begin(position)` says whether a task is still wanted.
    """

    def __init__(
        self,
        items: MutableSequence[Any] | Sequence[Any],
        deliver: Deliver,
        *,
        starred: bool = False,
        retries: int = 0,
        done_items: Callable[[], Container[Any]] | None = None,
        begin: Callable[[int], bool] | None = None,
    ) -> None:
        self.items, self.starred = items, starred
        self.function = 0
        """The number under which workers know the function; the pool sets it."""
        self.is_cancelled, self.is_queued = False, False
        self.ended = threading.Event()
        """Set while no task is left or under way."""
        self._deliver, self._retries, self._done_items, self._begin = deliver, retries, done_items, begin
        self._lock = threading.Lock()
        self._next, self._under_way = 0, 0
        self._again: deque[list[int]] = deque()
        self._tries: dict[int, int] = {}
        self.task_s: float | None = None
        """What a task takes, as far as that is known."""
        self.longest_s = 0.0
        """No task has taken longer so far. Long ones are sent alone, so that this is what the longest has taken."""

    def append(self, item: Any) -> None:
        """Add a task."""
        assert isinstance(self.items, MutableSequence)
        with self._lock:
            self.items.append(item)
            self.ended.clear()

    def has_more(self) -> bool:
        """Return whether there is a task to be sent."""
        return not self.is_cancelled and (bool(self._again) or self._next < len(self.items))

    def left(self) -> int:
        """Return how many tasks have not been sent."""
        return 0 if self.is_cancelled else len(self.items) - self._next + sum(len(each) for each in self._again)

    def take(self, workers: int) -> Sequence[int]:
        """Return the positions of the tasks that go to a worker now; none, where those were not wanted any more."""
        if self._again:
            positions: Sequence[int] = self._again.popleft()
        else:
            count = chunk_tasks(
                len(self.items) - self._next, total=len(self.items), workers=workers, task_s=self.task_s
            )
            positions = range(self._next, min(self._next + count, len(self.items)))
            self._next = positions[-1] + 1
            if self._begin is not None:
                positions = [position for position in positions if self._begin(position)]
        self._under_way += len(positions)
        if not positions:
            self._end(0, (), (), {})
        return positions

    def done(self, positions: Sequence[int], values: Sequence[Any], failures: Mapping[int, Failure], s: float) -> None:
        """Hand on what came of the tasks, which took `s` seconds; those that failed are tried again, if they may be."""
        self.longest_s = max(self.longest_s, s)
        mean_s = s / len(positions)
        self.task_s = mean_s if self.task_s is None else _NEW_WEIGHT * mean_s + (1 - _NEW_WEIGHT) * self.task_s
        again = {position for position in failures if self._may_try_again(position, failures[position])}
        if again:
            values = [value for position, value in zip(positions, values, strict=True) if position not in again]
            positions = [position for position in positions if position not in again]
            failures = {position: failure for position, failure in failures.items() if position not in again}
            self._again.extend([position] for position in sorted(again))
        self._end(len(again) + len(positions), positions, values, failures)

    def lost(self, positions: Sequence[int], at: int, failure: Failure) -> None:
        """A worker died when it was at the `at`th of `positions` (-1: before the first): the rest is sent again."""
        kept = None if self._done_items is None else self._done_items()
        undone = [position for position in positions if kept is None or self.items[position] not in kept]
        culprit = positions[at] if at >= 0 and positions[at] in undone else None
        given_up = [culprit] if culprit is not None and not self._may_try_again(culprit, failure) else []
        alone = [culprit] if culprit is not None and not given_up else []
        others = [position for position in undone if position != culprit]
        self._again.extend(each for each in (alone, others) if each)
        left = set(undone)
        done = [position for position in positions if position not in left]
        failures = dict.fromkeys(given_up, failure)
        self._end(len(positions), [*done, *given_up], [None] * (len(done) + len(given_up)), failures)

    def give_up(self, failure: Failure, *, under_way: Sequence[int] = ()) -> None:
        """Fail every task that has not been sent, and those `under_way`, of which nothing more is heard."""
        positions = [*under_way, *(position for each in self._again for position in each)]
        positions += range(self._next, len(self.items))
        self._again.clear()
        self._next = len(self.items)
        self._end(len(under_way), positions, [None] * len(positions), dict.fromkeys(positions, failure))

    def cancel(self) -> None:
        """Send no more of it."""
        self.is_cancelled = True
        self._end(0, (), (), {})

    def _may_try_again(self, position: int, failure: Failure) -> bool:
        self._tries[position] = self._tries.get(position, 0) + 1
        return self._tries[position] <= (max(1, self._retries) if failure.is_death else self._retries)

    def _end(
        self, count: int, positions: Sequence[int], values: Sequence[Any], failures: Mapping[int, Failure]
    ) -> None:
        if positions:
            self._deliver(positions, values, failures)
        with self._lock:
            self._under_way -= count
            if not self._under_way and not self.has_more():
                self.ended.set()
