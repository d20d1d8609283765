"""After which steps all workers hold the same state, where they may be apart in between: boundaries.

1. Those that the job and the plan name: evaluations, checkpoints, the last step. All workers know them.
2. The next checkpoint by the clock (`checkpoint_s`): agreed upon at the boundary before.
3. Where servers have what the optimizer keeps, one about every 10 s (`Paced`), if the run goes on when it loses a
   worker: it goes on from the last boundary, of which each worker keeps a copy.
4. One that somebody asks for: to stop, to let another in. Workers that are apart cannot agree on "after the next step",
   so they agree on one that nobody has come to (`Agreement`).

How they agree: a worker that hears of the request says, between two steps, up to which step it has looked. From then on
it asks the store about every further step, and the answer is decided once for all: the first to ask makes it plain. As
soon as all have said theirs, whoever notices it first tries to make the next step that nobody has asked about a
boundary; where another has asked first, the one after it.

Example: worker 0 has looked up to step 40, worker 1, which is late, up to 31. Worker 1 notices that both are there, and
tries 41. Worker 0 has asked about 41 just before: it is plain. So it is 42: nobody can be there yet. Worker 0 asks
about 42 when it comes there, finds a boundary, and waits for worker 1.
"""

import time
from collections.abc import Callable

from torch.distributed import PrefixStore, Store

from shoal.comm.told import told
from shoal.spec.job import Job
from shoal.spec.plan import Plan

_PLAIN, _BOUNDARY = b"plain", b"boundary"
PACE_S, FIRST_STEPS = 10.0, 20
"""How far boundaries by the clock are apart: so much is done again after a loss, at most. And the first of them."""


def is_planned(job: Job, plan: Plan, step: int) -> bool:
    """Return whether the job or the plan says that all workers hold the same state after `step`."""
    every = [plan.checkpoint.every_steps, job.eval_every_steps if job.eval_data is not None else None]
    return step >= job.total_steps or any(number and step % number == 0 for number in every)


class Agreement:
    """How workers that are apart agree on a boundary that somebody has asked for. One for each thing that can be."""

    def __init__(self, store: Store | None, name: str, *, index: int, workers: int, last: int) -> None:
        self._store = PrefixStore(name, store) if store is not None and workers > 1 else None
        self._index, self._workers, self._last = index, workers, last
        self._seen = 0
        self._is_asking = False
        self._agreed: int | None = None
        self._known: dict[int, bool] = {}

    def is_boundary(self, step: int) -> bool:
        """Return whether `step` is one of these boundaries, the same on all workers that ask."""
        if not self._is_asking:
            self._seen = max(self._seen, step)
            return False
        if step not in self._known:
            self._known[step] = self._decide(step, _PLAIN) == _BOUNDARY
            if self._known[step]:
                self._agreed = step
        return self._known[step]

    def ask(self, step: int) -> None:
        """Want a boundary, from now on. Called between two steps, the last of which was `step`, on any worker."""
        if not self._is_asking:
            self._seen = max(self._seen, step)
            self._is_asking = True
            if self._store is not None:
                self._store.set(f"seen/{self._index}", str(self._seen))
                self._store.add("asking", 1)
        if self._agreed is None and self._all_ask():
            self._propose()

    def _all_ask(self) -> bool:
        return self._store is None or self._store.add("asking", 0) == self._workers

    def _propose(self) -> None:
        seen = [int(self._store.get(f"seen/{i}")) for i in range(self._workers)] if self._store else [self._seen]
        step = max(seen) + 1
        while self._agreed is None and step < self._last:
            self._known[step] = self._decide(step, _BOUNDARY) == _BOUNDARY
            self._agreed = step if self._known[step] else None
            step += 1

    def _decide(self, step: int, kind: bytes) -> bytes:
        return self._store.compare_set(f"step/{step}", "", kind.decode()) if self._store is not None else kind


class Paced:
    """Boundaries by the clock: at each, worker 0 says after how many steps the next one is to come."""

    def __init__(
        self, store: Store | None, *, index: int, step: int, timeout_s: float, check: Callable[[], None]
    ) -> None:
        self._store, self._index, self._timeout_s, self._check = store, index, timeout_s, check
        self._count, self._last = 0, (step, time.monotonic())
        self.next = step + FIRST_STEPS

    def settle(self, step: int) -> None:
        """Agree on the next one, after the boundary `step`. Called by every worker."""
        if step < self.next:
            return
        self._count += 1
        done, since_s = step - self._last[0], time.monotonic() - self._last[1]
        steps = max(1, min(round(PACE_S * done / max(since_s, 1e-6)), 10 * max(done, FIRST_STEPS)))
        if self._store is not None:
            key = f"after {self._count}"
            if self._index == 0:
                self._store.set(key, str(steps))
            steps = int(told(self._store, [key], timeout_s=self._timeout_s, check=self._check)[0])
        self.next, self._last = step + steps, (step, time.monotonic())


class Boundaries:
    """The boundaries of one worker's run; `next_save` tells the step of the next checkpoint by the clock, if any."""

    def __init__(self, job: Job, plan: Plan, store: Store | None, *, index: int) -> None:
        self._job, self._plan = job, plan
        self.next_save: Callable[[], int | None] = lambda: None
        self._store = own = PrefixStore("boundaries", store) if store is not None else None
        self._index = index
        self._paced: Paced | None = None

        def agreement(name: str) -> Agreement:
            return Agreement(own, name, index=index, workers=plan.workers, last=job.total_steps)

        self.stop, self.leave, self.fail = agreement("stop"), agreement("leave"), agreement("fail")

    def is_boundary(self, step: int) -> bool:
        """Return whether all workers hold the same state after `step`."""
        # All three are asked, each time: what one has looked at must be known to it.
        asked = [agreement.is_boundary(step) for agreement in (self.stop, self.leave, self.fail)]
        is_paced = self._paced is not None and step == self._paced.next
        return any(asked) or is_paced or is_planned(self._job, self._plan, step) or step == self.next_save()

    def pace(self, step: int, *, check: Callable[[], None]) -> None:
        """Have boundaries by the clock, from `step` on. Called by every worker."""
        store = PrefixStore("pace", self._store) if self._store is not None else None
        timeout_s = self._plan.timeout_s
        self._paced = Paced(store, index=self._index, step=step, timeout_s=timeout_s, check=check)

    def settle(self, step: int) -> None:
        """Note that all hold the same state after the boundary `step`. Called by every worker."""
        if self._paced is not None:
            self._paced.settle(step)
