"""A host of servers: one socket that listens, one thread for each connection, and the slices it holds.

A host runs in threads beside a worker (place="threads"), or in a process of its own. It is the primary of some slices
and has the replicas of others; which, says the store (`places`). The messages, by their `op`:

    hello               first on every connection, with the token of this set of servers; with worker and slice, by a
                        worker: it is then served that slice, or told that this host is not its primary
    part, push, sum, apply, add, pull, wait, save, bye   of a worker, for its slice: see `primary`
    keep, follow        of a primary, to its replica: see `replica`
    serve               of whoever opens the servers: be the primary of this slice
    take over           of a worker whose server is gone: be the primary of a slice that is followed here
"""

import contextlib
import socket
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from shoal.sync.server.places import Places, Serving
from shoal.sync.server.primary import Primary, update
from shoal.sync.server.replica import Deposed, Follower
from shoal.sync.server.shard import Shard, load, room_for
from shoal.sync.server.wire import Connection, Ended, listen

_LINGER_S = 10.0
"""How long a host that closes waits for workers that have not said goodbye."""


@dataclass
class _Followed:
    """A slice of which this host has the replica."""

    shard: Shard
    copy: list[int]
    """Which copy it is: see `Serving`."""


class Host:
    """Serves slices until `close`. `number` is which host it is in the store."""

    def __init__(
        self, number: int, store: Store, *, hosts: int, address: str, token: str, workers: int, timeout_s: float
    ) -> None:
        self.number, self._workers, self._timeout_s = number, workers, timeout_s
        self._closing = threading.Event()
        self._places = Places(store, hosts=hosts, token=token, in_vain=self._closing.is_set, timeout_s=timeout_s)
        self._primaries: dict[int, Primary] = {}
        self._followed: dict[int, _Followed] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._guard = threading.Lock()  # of the three above and the two below
        self._connections: dict[Connection, threading.Thread] = {}
        self._served: set[Connection] = set()
        self._listener, port = listen(address)
        self._thread = threading.Thread(target=self._accept, name=f"servers {number}", daemon=True)
        self._places.set_host(number, address, port)
        self._thread.start()

    def close(self, *, linger_s: float = _LINGER_S) -> None:
        """End all that runs here, once workers have said goodbye or `linger_s` has passed."""
        end_s = time.monotonic() + linger_s
        while self._served and time.monotonic() < end_s:
            time.sleep(0.01)
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # whoever accepts there is told at once
        self._listener.close()
        self._thread.join(5.0)  # nobody comes in any more
        with self._guard:
            connections = dict(self._connections)
        for connection in connections:
            connection.close()
        for thread in connections.values():
            thread.join(5.0)
        for primary in self._primaries.values():
            primary.follower.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed
                return
            connection = Connection(peer, in_vain=self._closing.is_set, timeout_s=self._timeout_s)
            thread = threading.Thread(target=self._serve, args=(connection,), name="server", daemon=True)
            with self._guard:
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            hello = connection.receive()
            if hello.get("op") != "hello" or hello.get("token") != self._places.token:
                return
            if "worker" in hello:
                self._serve_worker(connection, hello["worker"], hello["slice"])
            else:
                self._serve_host(connection)
        except (OSError, Ended):  # it broke, or this host closes
            pass
        except Exception:  # a mistake of ours, or the store is gone: whoever is at the other end sees it close
            if not self._closing.is_set():
                traceback.print_exc()
        finally:
            connection.close()
            with self._guard:
                self._connections.pop(connection, None)

    def _serve_worker(self, connection: Connection, worker: int, number: int) -> None:
        primary = self._primaries.get(number)
        if primary is None:
            connection.send({"ok": False})
            return
        primary.join(worker, connection)
        self._places.tell_alive(worker)
        self._served.add(connection)
        in_order = False
        try:
            connection.send({"ok": True})
            while (header := connection.receive(may_idle=True))["op"] != "bye":
                _answer(connection, primary, worker, header)
            in_order = True
        except Deposed:
            self._step_down(number, primary)
            in_order = True  # it is this server that ends
        except Ended:
            in_order = True
        finally:
            self._served.discard(connection)
            if primary.leave(worker, connection, in_order=in_order or self._closing.is_set()):
                with contextlib.suppress(RuntimeError):  # the store is gone: nobody takes over any more
                    self._places.tell_dead(worker)

    def _serve_host(self, connection: Connection) -> None:
        calls = {"keep": self._keep, "follow": self._follow, "serve": self._be_first, "take over": self._take_over}
        while True:
            header = connection.receive(may_idle=True)
            room = room_for(header["shard"]) if "shard" in header else [torch.empty(header["bytes"], dtype=torch.uint8)]
            connection.receive_into(*room)
            with self._lock(header["slice"]):
                is_good = calls[header["op"]](header["slice"], header, room)
            connection.send({"ok": is_good})

    def _keep(self, number: int, header: dict[str, Any], tensors: list[Tensor]) -> bool:
        """Be the replica of a slice from now on, unless it is served here by a later word than the sender's."""
        epoch, primary = header["copy"][0], self._primaries.get(number)
        if primary is not None:
            if primary.follower.serving.epoch >= epoch:
                return False
            self._step_down(number, primary)
        self._followed[number] = _Followed(load(header["shard"], tensors), header["copy"])
        return True

    def _follow(self, number: int, header: dict[str, Any], tensors: list[Tensor]) -> bool:
        """Do what the primary does, unless it is none any more."""
        followed = self._followed.get(number)
        if followed is None or followed.copy != header["copy"]:
            return False
        gradient = tensors[0].view(followed.shard.flat.dtype)
        update(followed.shard, header["mark"], gradient, header["settings"], scale=header["scale"])
        return True

    def _be_first(self, number: int, header: dict[str, Any], tensors: list[Tensor]) -> bool:
        """Be the first primary of a slice."""
        shard, follower = load(header["shard"], tensors), self._follower(number, Serving(**header["serving"]))
        follower.copy_first(shard)
        self._begin(number, shard, follower)
        return True

    def _take_over(self, number: int, header: dict[str, Any], _: list[Tensor]) -> bool:
        """Be the primary of a slice that was followed here, unless that has been settled already."""
        followed, before = self._followed.get(number), self._places.serving(number)
        is_mine = before.replica == self.number and before.epoch == header["epoch"]
        if followed is None or not is_mine or followed.copy != before.copy:
            return False
        follower = self._follower(number, before, gone=frozenset({before.primary}))
        del self._followed[number]  # from here on the old primary, if it lives, is not followed any more
        try:
            follower.take_over(followed.shard, before, primary=self.number)
        except Deposed:
            return False
        except BaseException:
            self._followed[number] = followed
            raise
        self._begin(number, followed.shard, follower)
        return True

    def _step_down(self, number: int, primary: Primary) -> None:
        """Serve a slice no more: another host does."""
        primary.follower.close()
        primary.depose()
        if self._primaries.get(number) is primary:
            del self._primaries[number]

    def _begin(self, number: int, shard: Shard, follower: Follower) -> None:
        self._primaries[number] = Primary(
            shard,
            workers=self._workers,
            dead=self._places.dead(self._workers),
            follower=follower,
            in_vain=self._closing.is_set,
            timeout_s=self._timeout_s,
        )

    def _follower(self, number: int, serving: Serving, gone: frozenset[int] = frozenset()) -> Follower:
        return Follower(number, serving, self._places, gone=gone)

    def _lock(self, number: int) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(number, threading.Lock())


def _answer(connection: Connection, primary: Primary, worker: int, header: dict[str, Any]) -> None:
    """Do what a worker asks, and answer it; a part of a gradient is not answered."""
    match header["op"]:
        case "part":
            connection.receive_into(primary.buffer(worker, header["begin"], header["end"]))
        case "push":
            connection.send(primary.push(worker, header))
        case "sum":
            connection.send(primary.sum(header))
        case "apply":
            answer, flat = primary.apply(header)
            connection.send(answer, flat)
        case "add":
            answer, flat = primary.add(worker, header)
            connection.send(answer, flat)
        case "pull":
            answer, flat = primary.pull()
            connection.send(answer, flat)
        case "wait":
            connection.send(primary.wait_for(header))
        case "save":
            answer, tensors = primary.save()
            connection.send(answer, *tensors)
        case other:
            raise ValueError(f"{other!r} is no message.")
