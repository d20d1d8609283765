"""The replica of a slice: it does what the primary does, in the same order, and takes over when the primary dies.

1. A primary copies the whole slice to another host (`keep`), and from then on sends it each gradient that it applies,
   already summed (`follow`). The replica runs the same optimizer on the same bits, and answers.
2. Only then are workers answered: what a worker has been told of is on two hosts.
3. If the replica is gone, the primary finds another host, copies the slice there, and says so in the store.
4. A replica that has taken over follows its old primary no more, if that still lives: this one then reads in the store
   that it is deposed, closes its connections, and its workers find the new one there. Nobody ever goes on with two.
5. Two that want to serve a slice, the primary with a new replica and the replica as the new primary, may copy it to the
   same host. The store lets one of them; a copy is known by its epoch and by who made it, and the other's is no use.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal.sync.server.places import Places, Serving
from shoal.sync.server.shard import Shard
from shoal.sync.server.wire import Connection, Ended


class Deposed(Exception):
    """Another host serves this slice now."""


class Follower:
    """The primary's side: where its replica is, if anywhere."""

    def __init__(
        self,
        number: int,
        serving: Serving,
        places: Places,
        *,
        gone: frozenset[int] = frozenset(),
    ) -> None:
        self.serving = serving
        self._number, self._places, self._gone = number, places, set(gone)
        self._connection: Connection | None = None
        self._is_closed = False

    def copy_first(self, shard: Shard) -> None:
        """Copy the slice to the replica that is meant to be its first."""
        if self.serving.replica is not None:
            self._connection = self._copy(shard, self.serving.replica, self.serving)

    def begin(
        self, mark: dict[str, Any], gradient: Tensor, settings: Sequence[dict[str, Any]], *, scale: float
    ) -> None:
        """Send an update to the replica."""
        header = {"op": "follow", "slice": self._number, "copy": self.serving.copy, "mark": mark, "scale": scale}
        if self._connection is not None:
            try:
                self._connection.send({**header, "settings": settings}, gradient)
            except OSError:
                self._lose()

    def finish(self, shard: Shard) -> None:
        """Wait until the replica has the update, or another replica has all of the slice."""
        if self._connection is not None:
            try:
                if not self._connection.receive()["ok"]:  # it has taken over, or has another's copy
                    self._drop()
            except OSError:
                self._lose()
        if self._connection is None and self.serving.replica is not None:
            if self._places.serving(self._number) != self.serving:
                raise Deposed(f"slice {self._number} is served by another host now.")
            self.take_over(shard, self.serving, primary=self.serving.primary)

    def take_over(self, shard: Shard, before: Serving, *, primary: int) -> None:
        """Have the slice copied to a host that lives, and be the primary, with that one as the replica."""
        if self._is_closed:
            raise Deposed(f"slice {self._number} is not served here any more.")
        after = replace(before, epoch=before.epoch + 1, primary=primary, replica=None)
        others = [(primary + ahead) % self._places.hosts for ahead in range(1, self._places.hosts)]
        for host in others:
            if host in self._gone or host == primary:
                continue
            try:
                self._connection = self._copy(shard, host, after)
                after = replace(after, replica=host)
                break
            except OSError:
                self._gone.add(host)
        try:
            is_first = self._places.change(self._number, before, after)
        except BaseException:
            self.close()
            raise
        if not is_first:
            self.close()
            raise Deposed(f"slice {self._number} is served by another host now.")
        self.serving = after

    def close(self) -> None:
        """End the connection, for good."""
        self._is_closed = True
        self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _lose(self) -> None:
        self._drop()
        if self.serving.replica is not None:
            self._gone.add(self.serving.replica)

    def _copy(self, shard: Shard, host: int, serving: Serving) -> Connection:
        connection = self._places.dial(host)
        header, tensors = shard.save()
        try:
            message = {"op": "keep", "slice": self._number, "copy": serving.copy, "shard": header}
            if not connection.request(message, *tensors)["ok"]:
                raise Deposed(f"slice {self._number} is served by host {host} now.")
            if self._is_closed:  # while it was copied: nobody would close this connection any more
                raise Ended("this server closes.")
        except BaseException:
            connection.close()
            raise
        return connection
