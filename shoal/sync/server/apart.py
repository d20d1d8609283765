"""Asynchronous servers: each worker takes parts of steps as it is free, and its gradient is used as it comes.

1. A worker takes a ticket (`tickets`), computes the mean gradient over that part, and pushes it with what it weighs.
2. Each server adds it, times weight / W, where W is what the global batch weighs, to the step that it is gathering. The
   p-th part that comes, whoever's and of whichever step, has the optimizer do that step. A gradient that was computed
   with parameters s > 1 steps old counts only 1/s. Clipping is by the norm of the part's own gradient.
3. The answer has the parameters as they are then. Nobody waits for anybody, but a worker too far ahead
   (`max_staleness`) for the oldest ticket, and all of them at a boundary, for the last.
4. The learning rate is the schedule's for the step that the last of the parts is of.

Why not a step of the optimizer for each part, with lr / p? For SGD that is as good. Adam divides by the root of the
mean square of gradients, which for a p-th of the batch is mostly noise, and so goes less far: 200 steps of a small
classifier with AdamW, 4 workers, one 4 times slower, ended 19% above the loss of steps in turn; gathered, 0.6%
(simulated; torch 2.13, 2026-11).

Every gradient is about a step late, which training bears as long as a step is small: with SGD and momentum 0.9, a
learning rate near the largest that steps in turn bear makes this one diverge, as it does one process that is late.

Example: 4 workers, one 4 times slower than the others. In the time in which that one does a part, the others do 12: the
run goes 3.25 times as fast as one worker. Its gradient is 12 parts old by then, 3 steps: a third of it counts.
"""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.errors import PeerLost
from shoal.sync.mode import Met, Mine, Trained
from shoal.sync.server.slices import settings_of
from shoal.sync.server.tickets import Done, Ticket, Tickets

if TYPE_CHECKING:
    from shoal.sync.server.mode import Servers

_PAUSE_S = 2e-3


class Apart:
    """The tickets of one worker, and what comes of them. See `sync.mode.Tickets`."""

    def __init__(self, servers: "Servers", trained: Trained) -> None:
        self._servers, self._trained, self._place = servers, trained, servers.place
        place = servers.place
        self._queue = Tickets(
            servers.opened.store,
            worker=place.rank.index,
            workers=place.rank.workers,
            first_step=place.first_step,
            last_step=place.last_step,
            ask=self._ask,
            timeout_s=place.timeout_s,
        )
        self._scheduled = place.first_step - 1
        self._weights = [0.0, 0.0]
        """What the parts of this worker have weighed, and how many there were."""
        for link in servers.opened.links:
            link.seen = (place.first_step - 1) * place.rank.workers

    def next_part(self) -> tuple[int, int] | None:
        """Return the step and the part that this worker takes; None if all are given out."""
        with self._place.waiting():
            ticket = self._queue.take()
        return (ticket.step, ticket.part) if ticket is not None else None

    def meet(self, mine: Mine) -> Met:
        """Have the servers apply this worker's gradient, and take the parameters as they are then."""
        ticket = self._queue.release(mine.step, mine.part)
        self._schedule(mine.step - 1)
        self._clip()
        header: dict[str, Any] = {"ticket": ticket.number, "weight": mine.weight, "loss": mine.loss}
        header |= {"scale": self._share(mine), "settings": settings_of(self._trained.optimizer)}
        links = self._servers.opened.links
        with self._place.waiting():
            answers = self._servers.all([link.do(link.add, header) for link in links])
            self._servers.leave_gradients()
            self._note(answers)
            following = self._queue.held[0] if self._queue.held else None
            if following is not None and not self._is_behind_boundary(mine.step, following):
                self._keep_pace(following)
            self._place.changing()
            self._servers.copies.give_parameters()
        staleness = max(answer["staleness"] for answer in answers)
        took_part = (self._place.rank.number,) if mine.weight else ()
        next_step = following.step if following is not None else mine.step + 1
        return Met(mine.loss, mine.weight, took_part, next_step, staleness)

    def settle(self, step: int) -> Met:
        """Wait until all parts up to `step`, a boundary, are applied, and hold what all hold after it."""
        with self._place.waiting():
            self._queue.wait_for_step(step)
        told = self._servers.settle()
        self._schedule(step)
        with self._place.waiting():
            self._wait_for_all(step)
        parts = told.get(str(step), [])
        weight = math.fsum(weight for _, weight, _ in parts)
        loss = math.fsum(weight * loss for _, weight, loss in parts) / (weight or 1.0)
        took_part = sorted({self._place.rank.number_of(worker) for worker, weight, _ in parts if weight})
        return Met(loss, weight, tuple(took_part), step + 1, is_common=True)

    def _keep_pace(self, ticket: Ticket) -> None:
        """Wait until the next ticket is not too far ahead, and have the parameters as they are then."""
        if self._queue.keep_pace(ticket, self._place.sync.max_staleness):
            self._servers.all([link.do(link.pull) for link in self._servers.opened.links])

    def _note(self, answers: Sequence[dict[str, Any]]) -> None:
        self._queue.dead = set().union(*(answer["dead"] for answer in answers))
        self._queue.oldest = min(answer["oldest"] for answer in answers)

    def _ask(self, ticket: int) -> list[Done]:
        answers = self._servers.all([link.do(link.wait, ticket) for link in self._servers.opened.links])
        self._note(answers)
        return [Done(answer["oldest"], set(answer["beyond"])) for answer in answers]

    def _share(self, mine: Mine) -> float:
        """Return what this part weighs of its global batch."""
        self._weights = [self._weights[0] + mine.weight, self._weights[1] + 1]
        usual = self._place.rank.workers * self._weights[0] / self._weights[1]
        return mine.weight / (mine.batch_weight or usual) if mine.weight else 0.0

    def _clip(self) -> None:
        if self._trained.clip_norm is not None:
            row = self._servers.copies.gradients
            factor = self._trained.clip_norm / (float(row.double().norm()) + 1e-6)
            if factor < 1.0:
                row.mul_(factor)

    def _schedule(self, steps: int) -> None:
        """Have the schedule where it is after so many steps."""
        while self._trained.schedule is not None and self._scheduled < steps:
            self._servers.step_schedule()
            self._scheduled += 1

    def _is_behind_boundary(self, step: int, ticket: Ticket) -> bool:
        return any(self._place.is_boundary(each) for each in range(step, ticket.step))

    def _wait_for_all(self, step: int) -> None:
        """Wait until all workers have what they hold after `step`: nobody's next gradient is in it."""
        store, workers = self._servers.opened.store, self._place.rank.workers
        store.add(f"settled {step}", 1)
        end_s = time.monotonic() + self._place.timeout_s
        while int(store.add(f"settled {step}", 0)) < workers - len(self._queue.dead):
            if self._place.watch is not None:
                self._place.watch.check()
            if time.monotonic() > end_s:
                raise PeerLost(f"not all workers have come to step {step} within {self._place.timeout_s:g} s.")
            time.sleep(_PAUSE_S)
            self._queue.dead = self._servers.opened.places.dead(workers)
