"""Copies of snapshots on another host: what is left when a host is lost with all its memory.

1. Where workers are on several hosts, each has a neighbour on another one, which listens. It connects, and says what
   its file of snapshots looks like; the neighbour makes the same file in the memory of its own host.
2. After each snapshot a thread sends its bytes, while training goes on; the neighbour puts them into the older slot,
   compares the sum, commits them, and answers. Only then they count.
3. Whoever reads the memory of that host finds these files among those of its own workers.

A slot is written over only by the snapshot after the next. All have delivered theirs by then: each waits for that
before the last update in between, and no worker can be a whole step ahead of another (training/snapshots.py).

Example: workers 0, 1 on host A and 2, 3 on host B. 0 sends to 2, 1 to 3, 2 to 0 and 3 to 1. Host B burns down: A's
memory has the files of all four.
"""

import contextlib
import hmac
import json
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shoal.comm.shm.kept import Room
from shoal.fault.snapshot_file import Layout, SnapshotFile, make_file

_LENGTH, _HEAD = struct.Struct("<Q"), struct.Struct("<4q")  # step, sum, bytes of text, bytes of the slot
_MOST_GREETING_BYTES = 1 << 28
_YES, _NO = b"y", b"n"
_LOOK_EVERY_S = 0.2
_GREETING_S = 10.0


class Address(NamedTuple):
    """Where a worker listens, and what to say to it."""

    host: str
    port: int
    secret: str


def neighbours(rooms: Sequence[str]) -> list[int | None]:
    """Return for each worker, given the room of each, who keeps its copy: one with another room, or None.

    Those of one host have different neighbours as far as there are so many.
    """
    found: list[int | None] = []
    for worker, room in enumerate(rooms):
        first = rooms.index(room)
        ring = [(first + ahead) % len(rooms) for ahead in range(1, len(rooms))]
        others = [other for other in ring if rooms[other] != room]
        number = rooms[:worker].count(room)
        found.append(others[number % len(others)] if others else None)
    return found


class Receiver:
    """Keeps copies for workers of other hosts, in the room of this one. Ended by `close`."""

    def __init__(self, room: Room, host: str, path_of: Callable[[int, int, int], Any], *, timeout_s: float) -> None:
        """Listen on this host's address `host`. `path_of` says where a file lies, by generation, worker and number.

        A snapshot that has begun to come, and of which nothing more does for `timeout_s`, is given up.
        """
        self._room, self._path_of, self._timeout_s = room, path_of, timeout_s
        self._listener = socket.create_server((host, 0))
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._links: list[socket.socket] = []
        self._files: dict[tuple[int, int], list[SnapshotFile]] = {}
        """By generation and worker: the one that it sends to, and one that it has outgrown."""
        self._is_closing = False
        self._start(self._accept)

    def close(self, *, removes: bool = False) -> None:
        """Receive no more. What has come stays unless this `removes` it."""
        self._is_closing = True
        for each in (self._listener, *self._links):
            with contextlib.suppress(OSError):  # not connected any more
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        if removes:
            for file in [file for files in self._files.values() for file in files]:
                file.remove()

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, name="copies of neighbours", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            self._links.append(link)
            if self._is_closing:
                link.close()
            self._start(self._serve, link)

    def _serve(self, link: socket.socket) -> None:
        """Take the snapshots of one worker, as long as they come."""
        with link, contextlib.suppress(OSError, ValueError, KeyError, TypeError, EOFError):  # it is gone, or no worker
            link.settimeout(_GREETING_S)
            layout = self._greeted(link)
            if layout is None:
                return
            whose = json.loads(layout.table)
            files = self._files.setdefault((int(whose["generation"]), int(whose["worker"])), [])
            file = self._answer(link, layout, whose, files)
            link.settimeout(self._timeout_s)
            while self._comes(link):
                step, total, text_bytes, size = _HEAD.unpack(_read(link, _HEAD.size))
                if size != file.layout.slot_bytes:
                    return
                slot = _older(file)
                file.begin(slot)
                _read_into(link, file.memory(slot))
                is_whole = file.accept(slot, step, total, text_bytes)
                while min(file.steps()) >= 0 and files[0] is not file:
                    files.pop(0).remove()  # one that was outgrown
                link.sendall(_YES if is_whole else _NO)

    def _comes(self, link: socket.socket) -> bool:
        """Wait for the next snapshot, however seldom they are taken; return whether there may be one."""
        while not self._is_closing:
            with contextlib.suppress(TimeoutError):
                return bool(link.recv(1, socket.MSG_PEEK))
        return False

    def _greeted(self, link: socket.socket) -> Layout | None:
        """Return what the file at the other end looks like; None if that is none of ours."""
        if not hmac.compare_digest(_read(link, len(self.address.secret)), self.address.secret.encode()):
            return None
        (length,) = _LENGTH.unpack(_read(link, _LENGTH.size))
        if length > _MOST_GREETING_BYTES:
            return None
        said = json.loads(_read(link, length))
        return Layout(said["table"].encode(), int(said["text_bytes"]), int(said["data_bytes"]))

    def _answer(
        self, link: socket.socket, layout: Layout, whose: dict[str, Any], files: list[SnapshotFile]
    ) -> SnapshotFile:
        """Make a file with that `layout`, the last of `files`, and say so; or why there is none, and raise OSError."""
        try:
            path = self._path_of(*(int(whose[name]) for name in ("generation", "worker", "number")))
            files.append(make_file(self._room, path, layout))
        except OSError as error:
            why = f"there is no room for its copy in {self._room.path.parent} of the neighbour: {error}".encode()
            link.sendall(_LENGTH.pack(len(why)) + why)
            raise
        link.sendall(_LENGTH.pack(0))
        return files[-1]


class Sender:
    """Sends the snapshots of this worker to its neighbour, in a thread. Ended by `close`."""

    def __init__(self, file: SnapshotFile, to: Address, *, timeout_s: float) -> None:
        """Connect; `failure` then says why the neighbour cannot keep copies, if it cannot."""
        self.failure = ""
        self._file, self._timeout_s = file, timeout_s
        self._orders: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._link: socket.socket | None = None
        try:
            self._link = socket.create_connection((to.host, to.port), timeout=timeout_s)
            self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.failure = self._greet(self._link, to.secret)
        except (OSError, EOFError) as error:
            self.failure = f"the neighbour cannot be reached: {error}"
        self._thread = threading.Thread(target=self._serve, name="snapshots to a neighbour", daemon=True)
        self._thread.start()

    def send(self, slot: int) -> None:
        """Begin to send a slot that was just committed."""
        self._is_idle.clear()
        self._orders.put(slot)

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until what was sent is there, or has failed. Raises what `check` raises, which is called meanwhile."""
        until_s = time.monotonic() + self._timeout_s
        while not self._is_idle.wait(_LOOK_EVERY_S):
            check()
            if time.monotonic() > until_s:
                self.failure = f"the neighbour has not answered within {self._timeout_s:g} s"
                self.close()
                return

    def close(self) -> None:
        """Send no more. Can be called again."""
        self._orders.put(None)
        if self._link is not None:
            with contextlib.suppress(OSError):  # not connected any more
                self._link.shutdown(socket.SHUT_RDWR)
            self._link.close()

    def _greet(self, link: socket.socket, secret: str) -> str:
        layout = self._file.layout
        said = {"table": layout.table.decode(), "text_bytes": layout.text_bytes, "data_bytes": layout.data_bytes}
        text = json.dumps(said).encode()
        link.sendall(secret.encode() + _LENGTH.pack(len(text)) + text)
        (length,) = _LENGTH.unpack(_read(link, _LENGTH.size))
        return _read(link, min(length, _MOST_GREETING_BYTES)).decode()

    def _serve(self) -> None:
        while (slot := self._orders.get()) is not None:
            try:
                if not self.failure and self._link is not None:
                    size = self._file.layout.slot_bytes
                    self._link.sendall(_HEAD.pack(*self._file.line(slot), size))
                    self._link.sendall(self._file.memory(slot))
                    if _read(self._link, 1) != _YES:
                        self.failure = "a snapshot arrived damaged at the neighbour"
            except (OSError, EOFError) as error:
                self.failure = f"the neighbour is gone: {error}"
            self._is_idle.set()
        self._is_idle.set()


def _older(file: SnapshotFile) -> int:
    steps = file.steps()
    return steps.index(min(steps))


def _read(link: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _read_into(link, memoryview(data))
    return bytes(data)


def _read_into(link: socket.socket, memory: "memoryview[int]") -> None:
    while memory:
        count = link.recv_into(memory)
        if not count:
            raise EOFError("the connection is closed")
        memory = memory[count:]
