"""Who serves which slice, as the store has it: the one authority, changed only by compare-and-set.

    host H      where host H of servers listens: "address port"
    slice K     {"epoch": 3, "primary": 1, "replica": 2}: each change has a new epoch; no replica is null
    dead W      worker W's connection broke: a server that takes over does not wait for it

Example: host 0 dies. A worker that notices asks host 1, the replica of slice 0, to take over from epoch 0. Host 1
copies the slice to host 2 and writes epoch 1: primary 1, replica 2. A second worker that asks finds it done.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store

from shoal.core.errors import PeerLost
from shoal.sync.server.wire import Connection, Ended, connect

_PAUSE_S = 5e-3


@dataclass(frozen=True)
class Serving:
    """Who serves a slice."""

    epoch: int
    primary: int
    replica: int | None

    @property
    def copy(self) -> list[int]:
        """What tells the copy on the replica from any other: the epoch, and who made it."""
        return [self.epoch, self.primary]


def first_serving(number: int, hosts: int, *, has_replica: bool) -> Serving:
    """Return who serves slice `number` at the beginning."""
    return Serving(0, number % hosts, (number + 1) % hosts if has_replica and hosts > 1 else None)


class Places:
    """The store of one set of servers, as a worker or a host sees it. `token` is the word by which one is let in."""

    def __init__(self, store: Store, *, hosts: int, token: str, in_vain: Callable[[], bool], timeout_s: float) -> None:
        self.store, self.hosts, self.token = store, hosts, token
        self.in_vain, self.timeout_s = in_vain, timeout_s

    def dial(self, host: int, **who: Any) -> Connection:
        """Return a connection to a host, which was greeted; OSError if it does not listen."""
        address, port = self._get(f"host {host}").split()
        connection = connect(address, int(port), in_vain=self.in_vain, timeout_s=self.timeout_s)
        try:
            connection.send({"op": "hello", "token": self.token, **who})
        except BaseException:
            connection.close()
            raise
        return connection

    def set_host(self, host: int, address: str, port: int) -> None:
        """Say where a host listens."""
        self.store.set(f"host {host}", f"{address} {port}")

    def begin(self, number: int, serving: Serving) -> None:
        """Say who serves a slice, for the first time: it can be asked now."""
        self.store.set(f"slice {number}", _text(serving))

    def serving(self, number: int) -> Serving:
        """Return who serves a slice, once somebody does."""
        return Serving(**json.loads(self._get(f"slice {number}")))

    def change(self, number: int, before: Serving, after: Serving) -> bool:
        """Change who serves a slice; return False if that is not `before` any more."""
        return self.store.compare_set(f"slice {number}", _text(before), _text(after)).decode() == _text(after)

    def tell_dead(self, worker: int) -> None:
        """Say that a worker's connection broke."""
        self.store.set(f"dead {worker}", "1")

    def tell_alive(self, worker: int) -> None:
        """Say that a worker is there, whatever was said before."""
        self.store.set(f"dead {worker}", "0")

    def dead(self, workers: int) -> set[int]:
        """Return the workers whose connections broke."""
        keys = [f"dead {worker}" for worker in range(workers)]
        return {worker for worker, key in enumerate(keys) if self.store.check([key]) and self.store.get(key) == b"1"}

    def _get(self, key: str) -> str:
        """Return what stands there, once it does: by looking, as a wait in the store holds up all its other users."""
        end_s = time.monotonic() + self.timeout_s
        while not self.store.check([key]):
            if self.in_vain():
                raise Ended("nobody waits for it any more.")
            if time.monotonic() > end_s:
                raise PeerLost(f"{key} of the parameter servers has not come within {self.timeout_s:g} s.")
            time.sleep(_PAUSE_S)
        return self.store.get(key).decode()


def _text(serving: Serving) -> str:
    return json.dumps(asdict(serving))
