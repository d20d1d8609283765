"""Who of the workers is gone, and who is only waiting for somebody else.

Each worker has a line in shared memory: whether it takes part, has left, or has lost somebody; for whom it waits; when
it last said so; which collective it is in. A worker's death is seen by its pidfd: that tells it at once, even where a
child still holds the dead one's files and sockets.

1. A worker waits for worker j and hears nothing for a slice: it writes down that it waits for j, and the time.
2. If j has lost k, k is lost to this one too. If j has left or died, j is lost. Both are known within a slice.
3. After `timeout_s` of silence the fault is j's, unless j itself has said lately that it waits for k: then it is k's.

Example: worker 2 is stopped after it told 1, but not 0, that it is ready. 0 waits for 2, and 1 waits for 0, which says
"waiting for 2": both name worker 2.
"""

import os
import select
import time
from collections.abc import Sequence
from typing import NamedTuple

from shoal.core.errors import PeerLost

SLICE_S = 0.05
"""How long a worker sleeps at most before it looks who is still there."""
LINE_BYTES = 64
"""A line of the processor's cache: two workers never write to the same one."""

_STALE_NS = 20 * int(SLICE_S * 1e9)  # a worker that waits writes every slice; a busy machine makes it late
_TAKES_PART, _LEFT, _LOST = 0, 1, 2
_STATE, _BLAMED, _WAITS_FOR, _SAID_NS, _CALLS = 0, 1, 2, 3, 4  # _CALLS has two words, for even and odd turns
_NOBODY = -1
_WORDS = LINE_BYTES // 8


class Verdict(NamedTuple):
    """Who is lost, and why."""

    lost: int
    why: str


class Watch:
    """One worker's eye on the others. Keeps the first failure: after that, every wait raises it at once."""

    def __init__(
        self, lines: memoryview, pidfds: Sequence[int], *, index: int, numbers: Sequence[int], timeout_s: float
    ) -> None:
        self.timeout_s, self.failure = timeout_s, ""
        self._lines, self._pidfds, self._index, self._numbers = lines.cast("q"), list(pidfds), index, list(numbers)
        self._own = index * _WORDS
        self._lanes = 0
        self._lines[self._own + _WAITS_FOR] = _NOBODY

    @property
    def numbers(self) -> list[int]:
        """What errors call the workers."""
        return self._numbers

    def new_lane(self) -> str:
        """Return a name for the next set of bells, the same on all workers: they make them in one order."""
        self._lanes += 1
        return f"memory of {'-'.join(map(str, self._numbers))}: {self._lanes}"

    def check(self) -> None:
        """Raise PeerLost if this worker has left or has lost somebody before."""
        if self.failure:
            raise PeerLost(self.failure)

    def note_call(self, call: int, *, parity: int) -> None:
        """Say which call this worker is in, in this turn."""
        self._lines[self._own + _CALLS + parity] = call

    def calls(self, *, parity: int) -> list[int]:
        """Return which call each worker is in, in this turn."""
        return self._lines[_CALLS + parity :: _WORDS].tolist()

    def note_waiting(self, peer: int) -> None:
        """Say that this worker waits for `peer`, now."""
        self._lines[self._own + _WAITS_FOR] = peer
        self._lines[self._own + _SAID_NS] = time.monotonic_ns()

    def note_going_on(self) -> None:
        """Say that this worker waits no longer."""
        self._lines[self._own + _WAITS_FOR] = _NOBODY

    def verdict_on(self, peer: int) -> Verdict | None:
        """Return why nothing more can come from `peer`, or None while it may."""
        number, state = self._numbers[peer], self._word(peer, _STATE)
        if state == _LOST:
            lost = self._word(peer, _BLAMED)
            return Verdict(lost, f"worker {self._numbers[lost]} was lost to worker {number}")
        if state == _LEFT:
            return Verdict(peer, f"worker {number} has left the group")
        if is_ended(self._pidfds[peer]):
            return Verdict(peer, f"worker {number} is dead (its process has ended)")
        return None

    def silence_of(self, peer: int) -> Verdict:
        """Return whose silence it is after `timeout_s` without a word of `peer`."""
        silent, seen = peer, {self._index}
        while silent not in seen and self._is_waiting(silent):
            seen.add(silent)
            silent = self._word(silent, _WAITS_FOR)
        if silent == self._index:  # they wait for this worker, and it for them: the one it waits for is as good as any
            silent = peer
        return Verdict(silent, f"worker {self._numbers[silent]} has been silent for {self.timeout_s:g} s")

    def hang_up_of(self, peer: int) -> Verdict:
        """Return what it means that `peer` has closed its connection."""
        return Verdict(peer, f"worker {self._numbers[peer]} is gone (it has closed its connection)")

    def lose(self, verdict: Verdict, during: str) -> PeerLost:
        """Return the error of a verdict, and tell those who wait for this worker whom it has lost."""
        self._lines[self._own + _BLAMED] = verdict.lost
        self._lines[self._own + _STATE] = _LOST
        self.failure = f"{verdict.why}; worker {self._numbers[self._index]} waited in {during}."
        return PeerLost(self.failure)

    def leave(self) -> None:
        """Say that this worker takes part no longer, and look no more. The descriptors are closed."""
        if self._lines[self._own + _STATE] == _TAKES_PART:
            self._lines[self._own + _STATE] = _LEFT
        self.failure = self.failure or "this shared-memory group was closed by its own worker; join a new one."
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds = []

    def _is_waiting(self, peer: int) -> bool:
        is_fresh = time.monotonic_ns() - self._word(peer, _SAID_NS) < _STALE_NS
        return is_fresh and self._word(peer, _WAITS_FOR) != _NOBODY

    def _word(self, peer: int, word: int) -> int:
        return self._lines[peer * _WORDS + word]


def is_ended(pidfd: int) -> bool:
    """Return whether the process has ended, reaped or not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
