"""Who has acknowledged a broadcast: each worker writes a receipt into the group's store, and the source asks there.

Broadcasts among the same workers of a group are numbered, whichever wires they go over; a worker's receipt is the
number of the last one it has, so the store keeps one a worker however many there are. Example: the source of broadcast
7 finds "7" of worker 1 and "6" of worker 2, who is missing.
"""

import time

import torch.distributed as dist

from shoal.core.errors import PeerLost

_POLL_S = 0.005


class Receipts:
    """Who has acknowledged a broadcast. For its source; the others' knows of nobody but themselves and the source."""

    def __init__(self, store: dist.Store, *, number: int, source: int, workers: set[int]) -> None:
        self._store = store
        self._number = number
        self._source = source
        self._missing = set(workers)

    def has(self, worker: int) -> bool:
        """Return whether `worker` has received all of it."""
        if worker in self._missing and self._received(worker) >= self._number:
            self._missing.discard(worker)
        return worker not in self._missing

    def missing(self) -> set[int]:
        """Return the workers that have not acknowledged yet."""
        return {worker for worker in sorted(self._missing) if not self.has(worker)}

    def wait(self, timeout_s: float) -> None:
        """Wait until all have acknowledged; raise PeerLost with the names of those that have not in `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while (missing := self.missing()) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        if missing:
            names = ", ".join(str(worker) for worker in sorted(missing))
            raise PeerLost(
                f"{'worker' if len(missing) == 1 else 'workers'} {names} did not acknowledge the broadcast of worker "
                f"{self._source} within {timeout_s:g} s."
            )

    def _received(self, worker: int) -> int:
        """Return the number of the last broadcast that `worker` has."""
        return int(self._store.get(_key(worker))) if self._store.check([_key(worker)]) else 0


def count_broadcast(store: dist.Store, *, worker: int) -> int:
    """Return the number of the broadcast that `worker` begins: the n-th of each worker is the same one."""
    return store.add(f"broadcasts of {worker}", 1)


def acknowledge(store: dist.Store, *, number: int, worker: int) -> None:
    """Write that `worker` has broadcast `number` and all before it."""
    store.set(_key(worker), str(number))


def _key(worker: int) -> str:
    return f"receipt of {worker}"
