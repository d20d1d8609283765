"""One worker's wait until it is on a list: it says that it is ready for the open step, and looks, again and again.

1. It begins with the step that its gradient is meant for. While that is open, it closes the list once it may be closed.
2. If it finds the list closed without it, it is late from now on: it says that it is ready for the step after that. It
   closes no list then: without one who is current there is nothing to close, and that one does.
"""

import time
from collections.abc import Callable

from shoal.sync.deadline.board import Board
from shoal.sync.deadline.listing import Listed, Ready, Waits, may_close
from shoal.sync.mode import Mine


class Turn:
    """What a worker brings, until it is listed."""

    def __init__(self, board: Board, mine: Mine, *, took_s: float, waits: Callable[[int, float], Waits]) -> None:
        """`waits` tells what there is to wait for in a step, after so many seconds."""
        self._board, self._mine, self._took_s, self._waits = board, mine, took_s, waits
        self._listed: Listed | None = None
        self._present: tuple[int, ...] = ()

    def wait(self) -> Listed:
        """Return the list that this worker is on, once there is one; raise PeerLost if a worker is lost."""
        self._say(self._mine.step)
        self._board.wait_until(self._is_listed, f"step {self._mine.step}", missing=self._missing)
        assert self._listed is not None
        return self._listed

    def _say(self, step: int) -> None:
        mine, self._since_s = self._mine, time.monotonic()
        self._me = Ready(self._board.index, step, mine.step, mine.weight, mine.loss, mine.samples, self._took_s)
        self._board.say(self._me)

    def _is_listed(self) -> bool:
        listed, ready = self._board.look()
        if listed.step < self._me.step:
            self._present = tuple(one.worker for one in ready)
            if not self._me.is_current:
                return False
            waits = self._waits(self._me.step, time.monotonic() - self._since_s)
            if not may_close(ready, waits):
                return False
            self._board.close(Listed(self._me.step, waits.is_boundary, tuple(ready)))
            listed, _ = self._board.look()
        if listed.step == self._me.step and self._me.worker in listed.workers:
            self._listed = listed
            return True
        self._say(listed.step + 1)
        return False

    def _missing(self) -> list[int]:
        return [worker for worker in range(self._board.workers) if worker not in self._present]
