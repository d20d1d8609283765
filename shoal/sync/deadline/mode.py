"""A step of the mode "deadline".

1. After its backward a worker says on the board that it is ready, and waits until the list of the open step is closed
   (listing.py says when; any current worker closes it). One that is not on it says that it is ready for the next one.
2. Those on the list sum their gradients among themselves, each scaled by what it weighs of the whole: those of late
   workers as well, or, with late="drop", zeros for them.
3. Those who are current update, all alike. A late one gets the state after that from one of them.
4. After a boundary, for which everybody is waited for, all have the buffers of the first current worker, too.

Example: 4 workers, 8 samples each, worker 3 stopped in step 7. The others do steps 7 and 8 with 24 samples each. Worker
3 goes on, and is ready with its gradient for step 7 while step 9 is open: that is done with 32 samples, and worker 3
gets the state after step 9. For it, `Met` says staleness 2 and next_step 10: it does not do its parts of 8 and 9.

There is no thread. A worker that is stopped is never ready, and nobody waits for it, but at a boundary. One that is
stopped between being listed and the end of the sum makes the others wait until the watch calls it lost.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shoal.comm.algorithms import Wire, broadcast
from shoal.comm.group import new_group
from shoal.sync.deadline.board import Board
from shoal.sync.deadline.catching_up import Departures, buffers_row, put_buffers, receive_state, step_schedule
from shoal.sync.deadline.limit import Limit
from shoal.sync.deadline.listing import Listed, Ready, Waits
from shoal.sync.deadline.summing import Row, Summing
from shoal.sync.deadline.turn import Turn
from shoal.sync.mode import Met, Mine, Place, Trained

PATIENCE_S = 0.25
"""How long a quorum waits for current workers, before late ones count for it, while no step's length is known."""


@dataclass(frozen=True)
class _Links:
    """What a worker has that is not alone."""

    board: Board
    wire: Wire
    summing: Summing
    departures: Departures


class Deadline:
    """Those who are there in time do the step. Opened by every worker, with equal parameters on all of them."""

    def __init__(self, trained: Trained, place: Place) -> None:
        self._trained, self._place, self._sync = trained, place, place.sync
        self._index, self._workers = place.rank.index, place.rank.workers
        self._row = Row(list(trained.parameters.values()), place.device)
        self._limit = Limit(place.sync.deadline_s)
        self._last = Listed(place.first_step - 1, is_boundary=True)
        self._links = self._meet_all() if self._workers > 1 else None
        self._left_s = time.monotonic()

    def meet(self, mine: Mine) -> Met:
        """Do a step with this worker's gradient: the one that it is meant for, or, where that is over, the open one."""
        assert mine.step == self._last.step + 1, "steps are done in their order"
        took_s = time.monotonic() - self._left_s
        with self._place.waiting():
            listed = self._listed(mine, took_s)
            counted = listed.counted(self._sync.late)
            total = sum(counted.values())
            self._sum(listed, counted[self._index] / total if total else 0.0)
        if mine.step == listed.step:
            self._update(has_samples=total > 0)
            self._send(listed)
        else:
            self._catch_up(listed, missed=listed.step - mine.step + 1)
        self._trained.optimizer.zero_grad(set_to_none=True)
        self._place.reached(listed.step)
        if listed.is_boundary:
            self._settle(listed)
        self._last = listed
        self._limit.note([one.took_s for one in listed.ready])
        self._left_s = time.monotonic()
        return Met(
            loss=listed.loss(counted),
            weight=total,
            took_part=tuple(self._place.rank.number_of(worker) for worker, weight in counted.items() if weight > 0),
            next_step=listed.step + 1,
            staleness=listed.step - mine.step,
            is_common=True,
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield nothing: at a boundary all gradients are in the parameters."""
        return iter(())

    def close(self) -> None:
        """Let go of the group, which must not outlive that of all workers."""
        self._links = None

    def _meet_all(self) -> _Links:
        """Return the links to the others, once they are here."""
        place = self._place
        board = Board(place.store, place.rank, watch=place.watch, timeout_s=place.timeout_s)
        board.open(self._last.step)
        group = new_group()
        wire = Wire(group, watch=place.watch)
        return _Links(board, wire, Summing(wire, place.sync.way), Departures(self._trained, wire))

    def _listed(self, mine: Mine, took_s: float) -> Listed:
        """Return the list of the step that this worker takes part in, once it is closed."""
        if self._links is None:
            ready = Ready(self._index, mine.step, mine.step, mine.weight, mine.loss, mine.samples, took_s)
            return Listed(mine.step, self._place.is_boundary(mine.step), (ready,))
        return Turn(self._links.board, mine, took_s=took_s, waits=self._waits).wait()

    def _waits(self, step: int, waited_s: float) -> Waits:
        """Return what there is to wait for in `step`, in which this worker is current."""
        limit_s, took_s = self._limit.seconds, {one.worker: one.took_s for one in self._last.ready}
        if self._sync.quorum and limit_s == math.inf:
            limit_s = PATIENCE_S
        return Waits(
            workers=self._workers,
            expected=self._limit.expected(took_s) if took_s else range(self._workers),
            is_boundary=self._place.is_boundary(step),
            waited_s=waited_s,
            limit_s=limit_s,
            quorum=self._sync.quorum,
            has_deadline=self._sync.deadline_s > 0,
        )

    def _sum(self, listed: Listed, scale: float) -> None:
        """Leave the weighted mean of the listed workers' gradients in the row."""
        self._row.fill(scale)
        if self._links is not None:
            self._links.summing.sum(self._row.numbers, listed.workers)

    def _update(self, *, has_samples: bool) -> None:
        """Do the step of the optimizer, or none where nobody's samples count, and of the schedule."""
        trained = self._trained
        if self._links is not None:
            self._links.departures.wait()
        if has_samples:
            self._row.put_back()
            if trained.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(list(trained.parameters.values()), trained.clip_norm)
            trained.optimizer.step()
        step_schedule(trained.schedule, 1)

    def _send(self, listed: Listed) -> None:
        """Begin to send the state to the late ones that this worker is to bring up."""
        if self._links is not None and listed.late:
            self._links.departures.start(late for late in listed.late if _source_of(late, listed) == self._index)

    def _catch_up(self, listed: Listed, *, missed: int) -> None:
        """Get the state after the step from a current worker."""
        assert self._links is not None
        begin_s = time.monotonic()
        with self._place.waiting():
            self._links.departures.wait()
            self._place.changing()
            num_bytes = receive_state(self._trained, self._links.wire, _source_of(self._index, listed))
        step_schedule(self._trained.schedule, missed)
        self._place.log.write(
            "caught_up", step=listed.step, missed=missed, bytes=num_bytes, seconds=time.monotonic() - begin_s
        )

    def _settle(self, listed: Listed) -> None:
        """Make all the same after a boundary, where everybody is listed."""
        if self._links is None:
            return
        self._links.departures.wait()
        row = buffers_row(self._trained)
        if row is not None:
            broadcast(row, self._links.wire, source=listed.current[0])
            put_buffers(self._trained, row)


def _source_of(late: int, listed: Listed) -> int:
    """Return which current worker sends its state to a `late` one: they take turns."""
    return listed.current[listed.late.index(late) % len(listed.current)]
