"""Which collectives this process has entered, and in which it waits: what `fault.watch` tells the others about it.

1. A lane is where collectives follow each other in one order, the same on all its workers: a set of bells in shared
   memory, or a process group of the engine. A worker that has entered call 1204 of a lane has entered all before.
2. Bells count their rings and keep what is waited for; the engine's own recorder numbers its collectives (with their
   shapes, and those not done yet). Nothing is done for each call but counting.
3. Whoever wants to know, twice a second, reads these counts from a thread of its own.

Example: workers 0 and 2 have entered call 1204 of the group "0", worker 1 only 1203: those two wait for worker 1.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from shoal.comm.torch_private import Recorded, collective_counts, collective_moves, groups_of, recorded_collectives
from shoal.core.errors import PeerLost

_MOST_BUCKETS = 64


@dataclass(frozen=True)
class Call:
    """A collective that this worker has entered and not left."""

    lane: str
    number: int
    """Which of the lane's collectives, from 1; 0 where they are not numbered (messages between two)."""
    what: str
    """Such as "all-reduce"."""
    detail: str = ""
    """Such as "bucket 7" or "shape (3,)"."""
    members: tuple[int, ...] = ()
    """The workers of the lane."""


class Lane(Protocol):
    """What a set of bells tells of itself."""

    entered: int
    waiting: str
    members: list[int]


@dataclass
class Calls:
    """What one process is in. `step` and `moves` are counted by whoever trains."""

    step: int = 0
    """The step that was begun last."""
    moves: int = 0
    """Anything else that shows that the worker goes on: a batch that came, say."""
    joined_ns: int = 0
    """When the group was joined, by the clock: what the engine recorded before is of an earlier one."""
    lost: str | None = None
    """Why it is in vain to wait for the others, once that is known: see `alive`."""
    _waiting_in: str = ""
    _lanes: dict[str, "weakref.ref[Lane]"] = field(default_factory=dict)
    _buckets: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_MOST_BUCKETS))

    def add_lane(self, name: str, lane: Lane) -> None:
        """Have a set of bells counted, as long as it lives."""
        self._lanes[name] = weakref.ref(lane)

    def note_bucket(self, numel: int, index: int) -> None:
        """Say which bucket of gradients the next collective of `numel` elements is."""
        self._buckets.append((numel, index))

    def check(self) -> None:
        """Raise PeerLost if it is known that waiting for the others is in vain."""
        if self.lost is not None:
            raise PeerLost(self.lost)

    @contextlib.contextmanager
    def waiting_in(self, what: str) -> Iterator[None]:
        """Say that the main thread waits for the others in `what`, which is no collective, for a `with` block."""
        self._waiting_in = what
        try:
            yield
        finally:
            self._waiting_in = ""

    def entered(self) -> dict[str, int]:
        """Return how many collectives of each lane this worker has entered."""
        found = {name: lane.entered for name, lane in self._living()}
        counts = collective_counts(since_ns=self.joined_ns)
        return found | {f"group {group}": count for group, count in counts.items()}

    def progress(self) -> tuple[int, ...]:
        """Return numbers that change whenever this worker goes on."""
        rings = sum(lane.entered for _, lane in self._living())
        return self.step, self.moves, rings, collective_moves()

    def waits(self) -> list[Call]:
        """Return the collectives that have been entered and not left."""
        found = [Call("", 0, self._waiting_in)] if self._waiting_in else []
        for name, lane in self._living():
            if waiting := lane.waiting:
                what, _, detail = waiting.partition(", ")
                found.append(Call(name, lane.entered, what.replace("_", "-"), detail, tuple(lane.members)))
        return found + self._pending()

    def _pending(self) -> list[Call]:
        members, buckets = groups_of(), list(self._buckets)
        found = []
        for one in reversed(recorded_collectives(since_ns=self.joined_ns)):  # the newest first, as buckets are matched
            if one.is_done:
                continue
            bucket = _take(buckets, one)
            shape = f"shape ({', '.join(map(str, one.shape))}{',' if len(one.shape) == 1 else ''})" if one.shape else ""
            detail = shape if bucket is None else f"bucket {bucket}"
            call = Call(f"group {one.group}", one.number, one.name, detail, members.get(one.group, ()))
            found.append(call)
        return found[::-1]

    def _living(self) -> list[tuple[str, Lane]]:
        found = []
        with contextlib.suppress(RuntimeError):  # another thread makes bells just now: the next time, then
            for name, reference in list(self._lanes.items()):
                lane = reference()
                if lane is None:
                    self._lanes.pop(name, None)
                else:
                    found.append((name, lane))
        return found


def _take(buckets: list[tuple[int, int]], one: Recorded) -> int | None:
    """Return the bucket that a collective is, the last one noted with its size; taken out of the list."""
    if one.name == "all-reduce" and len(one.shape) == 1:
        for at in range(len(buckets) - 1, -1, -1):
            if buckets[at][0] == one.shape[0]:
                return buckets.pop(at)[1]
    return None


CALLS = Calls()
"""Those of this process: it is one worker."""
