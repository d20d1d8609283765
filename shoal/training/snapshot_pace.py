"""How often a snapshot is taken: so that it costs at most a hundredth of the time of steps, of replicas half as much.

1. What a snapshot takes of the training thread is measured; so is what the copying thread takes, which counts where the
   workers leave no core free for it.
2. After 8 snapshots, and now and then later, each worker says how many steps there must be from one to the next; all
   take the largest number, at the same step: a snapshot is of use only if all have one of the same step.

Example: a step takes 200 ms, a snapshot 1 ms of the training thread and 5 ms of a thread that takes them away from it:
3% of a step, so one snapshot every 3 steps.
"""

import math
import statistics
import time
from collections import deque

from shoal.fault.snapshot import Spent

MOST_SHARE, MOST_SHARE_OF_COPIES = 0.01, 0.005
"""Of the time of steps: where slices are nowhere else, and where the workers are replicas of each other."""
_UNUSUAL = 2
"""How many snapshots at the beginning say nothing of the others: their memory is touched for the first time."""
_FIRST, _LATER, _KEPT = 8, 256, 8
_MOST_STEPS = 1000


class Pace:
    """When snapshots are due."""

    def __init__(self, every: int, *, is_busy: bool, has_copies: bool = False) -> None:
        """`every` is how often the plan says, 0 if it leaves that open.

        `is_busy`: no core is free for copying. `has_copies`: the workers are replicas.
        """
        self._most_share = MOST_SHARE_OF_COPIES if has_copies else MOST_SHARE
        self.every, self._is_fixed, self._is_busy = max(1, every), every > 0, is_busy
        self._count, self._next_decision = 0, _FIRST
        self._spent: deque[Spent] = deque(maxlen=_KEPT)
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._last: tuple[int, float] | None = None
        self._least = 1

    def is_due(self, step: int) -> bool:
        """Return whether the state after `step` is to be copied."""
        return step % self.every == 0 and (self._last is None or step - self._last[0] >= self._least)

    def keep_apart(self, steps: int) -> None:
        """Have so many steps at least from one snapshot to the next."""
        self._least, self.every = steps, max(self.every, steps)

    def note(self, step: int, before: Spent) -> None:
        """Take note that the copy of `step` was begun, and what the one before has taken in all."""
        now_s = time.perf_counter()
        if self._last is not None and self._count > _UNUSUAL:
            last, then_s = self._last
            self._steps.append((now_s - then_s) / max(1, step - last))
            self._spent.append(before)
        self._count += 1
        self._last = step, now_s

    @property
    def is_to_decide(self) -> bool:
        """Whether it is time to say again how often."""
        return self._count == self._next_decision

    def asked(self) -> int:
        """Return how many steps there must be from one snapshot to the next, by what they take here."""
        if self._is_fixed or not self._steps:
            return self.every
        cost_s = self._cost_s()
        step_s = max(statistics.median(self._steps) - cost_s / self.every, 1e-9)
        return max(self._least, min(_MOST_STEPS, math.ceil(cost_s / (self._most_share * step_s))))

    def decide(self, every: int) -> bool:
        """Take a snapshot after `every` steps from now on; return whether that is another number than before."""
        self._next_decision = self._count + _LATER
        is_new, self.every = every != self.every, every
        return is_new

    def figures(self) -> dict[str, float]:
        """Return what snapshots take, for the run's events."""
        return {
            "every": self.every,
            "count": self._count,
            "stall_s": round(self._median("stall_s"), 6),
            "copy_s": round(self._median("copy_s"), 6),
            "cost_share": round(self._cost_s() / self.every / max(self._step_s(), 1e-9), 5),
        }

    def sentence(self) -> str:
        """Return how often snapshots are taken, and why."""
        return (
            f"A snapshot of the workers' state is taken every {self.every} steps: it costs "
            f"{self._cost_s() * 1e3:.1f} ms, and a step takes {self._step_s() * 1e3:.1f} ms."
        )

    def _cost_s(self) -> float:
        return self._median("stall_s") + (self._median("copy_s") if self._is_busy else 0.0)

    def _step_s(self) -> float:
        return statistics.median(self._steps) if self._steps else 0.0

    def _median(self, name: str) -> float:
        return statistics.median(getattr(each, name) for each in self._spent) if self._spent else 0.0
