"""A slice as its primary serves it: what the workers push is summed and applied, or applied as it comes.

In step:
1. Each worker's gradient comes in stretches, into a buffer of its own; then it says what that weighs (`push`).
2. Once all workers that are there have, the list of those who are in the step is closed, and everyone is told.
3. A worker that has heard the lists of all servers says what to apply (`apply`): the list, and the factor by which the
   gradient is clipped. The first one to say so has it done; all get the parameters.
   The lists of two servers differ only if a worker died in between: what all of them have is then applied.

As it comes (`add`): a gradient is added at once to the step that is being gathered, the less of it the staler it is.

Each update is answered only when the replica has it too. A message that comes a second time (because the server that
had it died) is known by its step or its ticket, and changes nothing.

Example: workers 0, 1 and 2 push weights 8, 8 and 4. Each is told "0, 1, 2". The gradient is (8 g0 + 8 g1 + 4 g2) / 20.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.sync.server.replica import Deposed, Follower
from shoal.sync.server.shard import Shard
from shoal.sync.server.wire import LOOK_S, Connection, Ended


class Primary:
    """Serves one slice. Each worker's messages come from a thread of its own; `_changed` guards all there is."""

    def __init__(
        self,
        shard: Shard,
        *,
        workers: int,
        dead: set[int],
        follower: Follower,
        in_vain: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self.shard, self.follower = shard, follower
        self._workers, self._in_vain, self._timeout_s = workers, in_vain, timeout_s
        self._changed = threading.Condition()
        self._connections: dict[int, Connection] = {}
        self._dead = set(dead)
        self._is_deposed = False
        self._buffers: dict[int, Tensor] = {}
        self._pushed: dict[int, dict[str, Any]] = {}
        self._closed: list[int] | None = None
        self._sum: tuple[list[int], Tensor] | None = None
        self._copy: Tensor | None = None
        """The parameters as they are, for sending: the slice may be updated meanwhile."""

    def join(self, worker: int, connection: Connection) -> None:
        """Take in a worker, or have it back by another connection."""
        with self._changed:
            self._connections[worker] = connection
            self._dead.discard(worker)
            if worker not in self._buffers:
                self._buffers[worker] = torch.zeros_like(self.shard.flat)

    def leave(self, worker: int, connection: Connection, *, in_order: bool) -> bool:
        """Go on without a worker whose `connection` has ended; return whether it is taken for dead."""
        with self._changed:
            if self._connections.get(worker) is not connection:
                return False  # it is back already, by another one
            del self._connections[worker]
            if in_order or self._is_deposed:
                return False
            self._dead.add(worker)
            self._changed.notify_all()
            return True

    def depose(self) -> None:
        """Send all workers away: another host serves this slice now."""
        with self._changed:
            self._is_deposed = True
            self._changed.notify_all()
            for connection in self._connections.values():
                connection.close()

    def buffer(self, worker: int, begin: int, end: int) -> Tensor:
        """Return where a stretch of that worker's gradient goes."""
        return self._buffers[worker][begin:end]

    def push(self, worker: int, header: dict[str, Any]) -> dict[str, Any]:
        """Take the gradient in the worker's buffer for a step; return who is in the step once that is known."""
        with self._serving():
            if header["step"] <= self.shard.version:
                return {"done": True, **self.shard.told}
            self._pushed[worker] = header
            self._changed.notify_all()
            self._wait(lambda: header["step"] <= self.shard.version or self._is_closed())
            if self._closed is None:  # another worker was told before, and has had it applied since
                return {"done": True, **self.shard.told}
            squares = self._squares(self._closed) if header["norm"] else 0.0
            return {"done": False, "squares": squares, **self._told(self._closed)}

    def sum(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return the square of the norm of the gradient of those on a list, where the lists of servers differ."""
        with self._serving():
            if header["step"] <= self.shard.version:
                return {"done": True, **self.shard.told}
            return {"done": False, "squares": self._squares(header["list"]), **self._told(header["list"])}

    def apply(self, header: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """Do a step with the gradient of those on the list; return the parameters after it."""
        with self._serving():
            if header["step"] > self.shard.version:
                gradient = self._summed(header["list"])
                if header["factor"] != 1.0:
                    gradient.mul_(header["factor"])
                told = {**self._told(header["list"]), "factor": header["factor"]}
                self._update({"version": header["step"], "told": told}, gradient, header["settings"], scale=1.0)
                self._pushed, self._closed, self._sum = {}, None, None
                self._changed.notify_all()
            return {}, self._parameters()

    def add(self, worker: int, header: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """Take the gradient in the worker's buffer now; return the parameters, and how stale it was, in steps."""
        with self._serving():
            stale, done = 0, self.shard.done
            if not done.has(header["ticket"]):
                stale = max(0, done.count // self._workers - header["seen"] // self._workers)
                scale = header["scale"] / max(1, stale)
                gradient = self._buffers[worker]
                mark = {name: header[name] for name in ("ticket", "weight", "loss")} | {"worker": worker}
                self._update(mark, gradient, header["settings"], scale=scale)
                self._changed.notify_all()
            return {**self._far(), "staleness": stale}, self._parameters()

    def pull(self) -> tuple[dict[str, Any], Tensor]:
        """Return the parameters as they are now."""
        with self._serving():
            return self._far(), self._parameters()

    def wait_for(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return how far this server is when all tickets before one are applied, or after a moment."""
        with self._serving():
            if self.shard.done.oldest < header["ticket"]:
                self._changed.wait(LOOK_S)
            return {**self._far(), "beyond": sorted(self.shard.done.beyond)}

    def save(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Return all of the slice, as it is now."""
        with self._serving():
            header, tensors = self.shard.save()
            return header, [tensor.clone() for tensor in tensors]

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        """Be alone with the slice, as long as it is served here."""
        with self._changed:
            if self._is_deposed:
                raise Deposed("another host serves this slice now.")
            yield

    def _parameters(self) -> Tensor:
        if self._copy is None:
            self._copy = self.shard.flat.clone()
        return self._copy

    def _far(self) -> dict[str, Any]:
        """Return how far the tickets are, and which workers are gone."""
        done = self.shard.done
        return {"seen": done.count, "oldest": done.oldest, "dead": sorted(self._dead)}

    def _is_closed(self) -> bool:
        if self._closed is None:
            awaited = set(range(self._workers)) - self._dead
            if awaited <= self._pushed.keys():
                self._closed = sorted(self._pushed)
                self._changed.notify_all()
        return self._closed is not None

    def _told(self, workers: list[int]) -> dict[str, Any]:
        """Return what the workers on a list have brought, by name."""
        there = [worker for worker in workers if worker in self._pushed]
        names = ("weight", "loss", "samples")
        return {"list": there, **{name: [self._pushed[worker][name] for worker in there] for name in names}}

    def _squares(self, workers: list[int]) -> float:
        return float(self._summed(workers).double().square().sum())

    def _summed(self, workers: list[int]) -> Tensor:
        """Return the weighted mean over the gradients of `workers`, added up in their order."""
        if self._sum is None or self._sum[0] != workers:
            there = [worker for worker in workers if worker in self._pushed]
            total = sum(self._pushed[worker]["weight"] for worker in there)
            mean = torch.zeros_like(self.shard.flat)
            for worker in there:
                if weight := self._pushed[worker]["weight"]:
                    mean.add_(self._buffers[worker], alpha=weight / total)
            self._sum = (workers, mean)
        return self._sum[1]

    def _update(
        self, mark: dict[str, Any], gradient: Tensor, settings: Sequence[dict[str, Any]], *, scale: float
    ) -> None:
        """Update the slice here and on its replica; afterwards both have it, or this is no primary any more."""
        self.follower.begin(mark, gradient, settings, scale=scale)
        self._copy = None
        update(self.shard, mark, gradient, settings, scale=scale)
        try:
            self.follower.finish(self.shard)
        except BaseException:
            self._is_deposed = True  # before anyone else can be told of the update
            raise

    def _wait(self, is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + self._timeout_s
        while not is_so():
            if self._is_deposed:
                raise Deposed("another host serves this slice now.")
            if self._in_vain():
                raise Ended("this server closes.")
            if time.monotonic() > end_s:
                raise TimeoutError(f"the gradients of a step have not come within {self._timeout_s:g} s.")
            self._changed.wait(LOOK_S)


def update(
    shard: Shard, mark: dict[str, Any], gradient: Tensor, settings: Sequence[dict[str, Any]], *, scale: float
) -> None:
    """Update a slice and note which step or ticket that was: on the primary and on the replica alike."""
    if "ticket" in mark:
        shard.add(mark, gradient, settings, scale=scale)
    else:
        shard.update(gradient, settings)
        shard.version, shard.told = mark["version"], mark["told"]
