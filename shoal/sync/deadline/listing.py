"""Who takes part in a step, decided from who is ready for it; pure, so that a test can play any case.

The open step is the first that has no list yet. A worker is current in it if its gradient was meant for it; it is late
if the gradient was meant for one before. The list of the open step is closed as soon as

1. all workers are ready; at a boundary, nothing less will do. Else, once a current worker with samples is ready, and
2. with a quorum: as many current ones are ready; or as many with those who are late, and either no more current ones
   can come, or the step has waited for its limit: late ones do not push current ones out;
3. without one: all who are current are ready. One that is late is not waited for: what it computes is not lost by that;
4. or the step has waited for its limit, from when the first current worker was ready.

The list has all who are ready then. Example: 4 workers, a limit of 50 ms. At step 7 workers 0, 1 and 2 are ready within
10 ms, worker 3 is not: the list {0, 1, 2} is closed 50 ms after the first. Step 8 has only these three to wait for. In
step 9 worker 3 is ready, with its gradient for step 7: it is on that list as late, and current from step 10 on.
"""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, field


@dataclass(frozen=True)
class Ready:
    """One worker that is ready."""

    worker: int
    """Its index."""
    step: int
    """The open step, in which it would take part."""
    meant: int
    """The step for which its gradient was computed."""
    weight: float
    loss: float
    samples: int
    took_s: float
    """How long it took for that gradient."""

    @property
    def is_current(self) -> bool:
        """Whether it has done all steps before the open one."""
        return self.meant == self.step


@dataclass(frozen=True)
class Listed:
    """Who takes part in a step: decided once, for all workers."""

    step: int
    is_boundary: bool = False
    ready: tuple[Ready, ...] = field(default=())
    """By their indices."""

    @property
    def workers(self) -> tuple[int, ...]:
        """The indices of those who take part."""
        return tuple(one.worker for one in self.ready)

    @property
    def current(self) -> tuple[int, ...]:
        """The indices of those who have done all steps before; there is at least one."""
        return tuple(one.worker for one in self.ready if one.is_current)

    @property
    def late(self) -> tuple[int, ...]:
        """The indices of those who have not."""
        return tuple(one.worker for one in self.ready if not one.is_current)

    def counted(self, late: str) -> dict[int, float]:
        """Return what the gradient of each weighs; with late="drop", those of late ones nothing."""
        return {one.worker: one.weight if one.is_current or late == "add" else 0.0 for one in self.ready}

    def loss(self, counted: dict[int, float]) -> float:
        """Return the mean loss over what counts; 0 where nothing does."""
        total = sum(counted.values())
        terms = [counted[one.worker] * one.loss for one in self.ready if counted[one.worker]]
        return math.fsum(terms) / total if total else 0.0


@dataclass(frozen=True)
class Waits:
    """How long the open step has waited, and what for."""

    workers: int
    """How many there are."""
    expected: Collection[int]
    """The indices of those who can be current in it, as they were on the list before, and are worth waiting for."""
    is_boundary: bool
    waited_s: float
    """Since the first current worker was ready."""
    limit_s: float
    """Infinite: it waits for all who are current."""
    quorum: int = 0
    has_deadline: bool = True
    """Whether the limit ends the wait where there is a quorum."""


def may_close(ready: Sequence[Ready], waits: Waits) -> bool:
    """Return whether the list of the open step is closed with those who are `ready` for it now."""
    if len(ready) == waits.workers:
        return True
    current = [one for one in ready if one.is_current]
    if waits.is_boundary or not any(one.weight > 0 for one in current):
        return False
    is_late = waits.waited_s >= waits.limit_s
    no_more = set(waits.expected) <= {one.worker for one in current}
    if not waits.quorum:
        return no_more or is_late
    enough = len(current) >= waits.quorum or (len(ready) >= waits.quorum and (no_more or is_late))
    return enough or (waits.has_deadline and is_late)


def ready_text(one: Ready) -> str:
    """Return it as the store holds it."""
    return json.dumps(astuple(one))


def read_ready(text: bytes) -> Ready | None:
    """Return who is ready; None for a worker that never was."""
    values = json.loads(text)
    return Ready(*values) if values else None


def listed_text(listed: Listed) -> str:
    """Return it as the store holds it."""
    return json.dumps([listed.step, listed.is_boundary, [astuple(one) for one in listed.ready]])


def read_listed(text: bytes) -> Listed:
    """Return a list that the store holds."""
    step, is_boundary, ready = json.loads(text)
    return Listed(step, is_boundary, tuple(Ready(*one) for one in ready))
