"""A worker's side of one slice: its connection to whoever serves it, found anew when that dies.

One thread owns the connection, and does what it is given in that order (`do`). A message that was under way when the
server died is sent again to its replica, which knows what it already has: nothing is applied twice.

Example: the server of slice 2 is killed while worker 0 waits for the parameters after step 7. The connection breaks.
Worker 0 reads in the store that host 3 has the replica, and asks it to take over. If host 3 has step 7 already, it
answers with the parameters; if not, worker 0 sends its gradient of step 7 again, as all workers do.
"""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from shoal.core.errors import PeerLost
from shoal.sync.server.places import Places, Serving
from shoal.sync.server.shard import room_for
from shoal.sync.server.slices import Slice
from shoal.sync.server.wire import Connection, Ended

CHUNK_NUMEL = 256 << 10
"""How much of a gradient is sent at once: 1 MB of float32, of which a link of 1 Gbit/s carries 120 a second."""
_PAUSE_S = 0.02
_ATTEMPTS = 20
_Answer = TypeVar("_Answer")


class Link:
    """To the server of one slice. `gradient` and `parameters` are where this worker has its copies of the slice."""

    def __init__(
        self,
        of: Slice,
        places: Places,
        *,
        worker: int,
        gradient: Tensor,
        parameters: Tensor,
        on_takeover: Callable[[Serving], None] = lambda _: None,
    ) -> None:
        self.slice, self.gradient, self.parameters = of, gradient, parameters
        self._places, self._worker, self._on_takeover = places, worker, on_takeover
        self._connection: Connection | None = None
        self._epoch = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"slice {of.number}")
        self.chunks = -(-of.numel // CHUNK_NUMEL)
        self._unsent = set(range(self.chunks))
        self.seen = 0
        """How many tickets were in the parameters that came last."""

    def do(self, function: Callable[..., _Answer], *arguments: Any) -> "Future[_Answer]":
        """Have the link's thread call `function`, one of this link, after what it was given before."""
        return self._thread.submit(function, *arguments)

    def close(self, *, in_order: bool) -> None:
        """Say goodbye, and end the thread."""

        def end() -> None:
            if self._connection is not None:
                with contextlib.suppress(OSError, Ended):
                    if in_order:
                        self._connection.send({"op": "bye"})
                self._drop()

        self._thread.submit(end)
        self._thread.shutdown(wait=True, cancel_futures=False)

    def begin(self) -> None:
        """Be ready for another gradient, of which nothing is sent yet."""
        self._unsent = set(range(self.chunks))

    def send_chunk(self, chunk: int) -> None:
        """Send a chunk of the gradient ahead of `push` or `add`. If it cannot be, those send it again."""
        if self._connection is not None and chunk in self._unsent:
            try:
                self._send_chunk(self._connection, chunk)
            except OSError:
                self._drop()

    def push(self, header: dict[str, Any]) -> dict[str, Any]:
        """Send what is left of the gradient, say what it weighs, and return who is in the step."""

        def call(connection: Connection) -> dict[str, Any]:
            self._send_rest(connection)
            return connection.request({**header, "op": "push"})

        return self._until_done(call)

    def sum(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return the squares of the gradient of those on a list."""
        return self._until_done(lambda connection: connection.request({**header, "op": "sum"}))

    def apply(self, header: dict[str, Any]) -> None:
        """Have the step done, and fill `parameters` with those after it."""

        def call(connection: Connection) -> None:
            if self._unsent:  # another server than the one it was pushed to
                self._send_rest(connection)
                connection.request({**header, "op": "push"})
            connection.request({**header, "op": "apply"})
            connection.receive_into(self.parameters)
            self.begin()

        self._until_done(call)

    def add(self, header: dict[str, Any]) -> dict[str, Any]:
        """Have the gradient applied as it is, and fill `parameters`; return how far the server is."""

        def call(connection: Connection) -> dict[str, Any]:
            self._send_rest(connection)
            answer = connection.request({**header, "op": "add", "seen": self.seen})
            connection.receive_into(self.parameters)
            self.seen = answer["seen"]
            self.begin()
            return answer

        return self._until_done(call)

    def pull(self) -> None:
        """Fill `parameters` with those that the server has now."""

        def call(connection: Connection) -> None:
            answer = connection.request({"op": "pull"})
            connection.receive_into(self.parameters)
            self.seen = answer["seen"]

        self._until_done(call)

    def wait(self, ticket: int) -> dict[str, Any]:
        """Wait a moment for all tickets before one to be applied; return how far the server is."""
        return self._until_done(lambda connection: connection.request({"op": "wait", "ticket": ticket}))

    def save(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Return all that the server has of the slice, as `Shard.save` gives it, and fill `parameters`."""

        def call(connection: Connection) -> tuple[dict[str, Any], list[Tensor]]:
            header = connection.request({"op": "save"})
            tensors = room_for(header)
            connection.receive_into(*tensors)
            self.parameters.copy_(tensors[0])
            self.seen = header["oldest"] + len(header["beyond"])
            return header, tensors

        return self._until_done(call)

    def _send_rest(self, connection: Connection) -> None:
        for chunk in sorted(self._unsent):
            self._send_chunk(connection, chunk)

    def _send_chunk(self, connection: Connection, chunk: int) -> None:
        begin, end = chunk * CHUNK_NUMEL, min((chunk + 1) * CHUNK_NUMEL, self.slice.numel)
        connection.send({"op": "part", "begin": begin, "end": end}, self.gradient[begin:end])
        self._unsent.discard(chunk)

    def _until_done(self, call: Callable[[Connection], _Answer]) -> _Answer:
        for _ in range(_ATTEMPTS):
            connection = self._connection or self._connect()
            try:
                return call(connection)
            except OSError:
                self._drop()
        raise PeerLost(f"the server of slice {self.slice.number} was lost {_ATTEMPTS} times in one step.")

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self.begin()

    def _connect(self) -> Connection:
        """Return a connection to the primary, after having its replica take over where it is gone."""
        end_s, number = time.monotonic() + self._places.timeout_s, self.slice.number
        while time.monotonic() < end_s and not self._places.in_vain():
            serving = self._places.serving(number)
            try:
                connection = self._served_by(serving.primary)
            except OSError:
                self._have_taken_over(serving)
                continue
            if connection is not None:
                if serving.epoch > self._epoch:
                    self._on_takeover(serving)
                self._connection, self._epoch = connection, serving.epoch
                return connection
            time.sleep(_PAUSE_S)
        if self._places.in_vain():
            raise Ended("nobody waits for it any more.")
        raise PeerLost(f"the server of slice {number} was not found within {self._places.timeout_s:g} s.")

    def _served_by(self, host: int) -> Connection | None:
        """Return a connection to a host that serves this slice, or None if it is not the one."""
        connection, is_kept = self._places.dial(host, worker=self._worker, slice=self.slice.number), False
        try:
            is_kept = connection.receive()["ok"]
        finally:
            if not is_kept:
                connection.close()
        return connection if is_kept else None

    def _have_taken_over(self, serving: Serving) -> None:
        """Ask the replica to take over from a primary that is gone."""
        number = self.slice.number
        with contextlib.suppress(OSError):
            if serving.replica is not None:
                with contextlib.closing(self._places.dial(serving.replica)) as connection:
                    connection.request({"op": "take over", "slice": number, "epoch": serving.epoch})
                return
        time.sleep(_PAUSE_S)
        if self._places.serving(number) == serving:
            also = "it had no replica" if serving.replica is None else "its replica, too"
            raise PeerLost(f"the server of slice {number} is gone, and {also}. Resume from the last checkpoint.")
