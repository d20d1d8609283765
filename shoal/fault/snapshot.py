"""A worker's last state in memory that outlives its process: what survivors take over when it dies.

1. After an optimizer's step, `take` lets a thread copy the state while forward and backward run; it sums it up on the
   way, and commits the slot (snapshot_file.py). What forward changes (buffers) is given to it as a copy.
2. Before the next optimizer's step, `wait` waits for that.
3. Two slots take turns. A slot is written over only when all workers of this host have a newer step complete: else one
   that dies in its copy of step 8 would leave the others with 8 and half of 9, and nobody with 7.
4. A state, or a text, that has outgrown its file gets a larger one, beside it (snapshot_place.py).

Example: workers 0 and 1 have steps 7 and 8. Worker 0 is done with step 9 and wants the slot of 7, while worker 1 still
copies 8: worker 0's thread waits. Worker 1 is killed: 7 is whole on both.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.comm.shm.kept import Room
from shoal.core.errors import PeerLost
from shoal.fault.shards import Shard
from shoal.fault.snapshot_file import SUFFIX, SnapshotFile, SnapshotReader, lay_out, make_file
from shoal.fault.snapshot_moves import Moves, event_of, ordered, pin, plan_moves
from shoal.fault.snapshot_neighbour import Address, Sender
from shoal.fault.snapshot_place import Peer, path_of

_LEAST_TEXT_BYTES = 1 << 16
_LOOK_EVERY_S, _POLL_S = 0.2, 0.0005
_WHOSE = ("generation", "worker", "part", "parts")
LIVE = "live"


@dataclass(frozen=True)
class Held:
    """A complete state of one worker, or its last copy. Only states of one generation and step make a whole."""

    generation: int
    """Of which set of workers: a step that is repeated by another set has other bits."""
    step: int
    worker: int
    """Its number among the workers of that generation."""
    part: int
    parts: int
    """The state is whole where all parts 0 ... parts - 1 are held. Replicas of one part have its number."""
    shards: Sequence[Shard] = field(repr=False)
    own: dict[str, Any] = field(repr=False)
    common: dict[str, Any] = field(repr=False)
    where: str = LIVE
    """`LIVE`: in the memory of this process; else the file that it lies in."""


def held_on_host(room: Room) -> list[Held]:
    """Return the snapshots in the memory of this host that are complete and undamaged, of workers alive or dead."""
    found = []
    for path in sorted(room.path.glob(f"*{SUFFIX}")):
        try:
            reader = SnapshotReader(path)
            generation, worker, part, parts = (int(reader.table[name]) for name in _WHOSE)
            slots = reader.complete()
        except (OSError, ValueError, KeyError, TypeError):
            continue  # removed meanwhile, or none of ours
        for slot in slots:
            own, common = slot.text["own"], slot.text["common"]
            found.append(Held(generation, slot.step, worker, part, parts, slot.shards, own, common, str(path)))
    return found


@dataclass
class Spent:
    """What the last snapshot took of the training thread, and of the thread that copies."""

    stall_s: float = 0.0
    copy_s: float = 0.0


@dataclass
class _Order:
    """A copy that the thread is to make."""

    shards: Sequence[Shard]
    step: int
    text: Callable[[], dict[str, Any]]
    is_computed: torch.cuda.Event | None
    """On a GPU: when the state is there."""


class Snapshots:
    """The snapshots of one worker, in the room of its host. All calls from one thread."""

    def __init__(
        self,
        room: Room,
        *,
        generation: int,
        worker: int,
        part: int,
        parts: int,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
        on_room: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`check` raises if a worker is lost: it is called while this one waits.

        `on_room` is told how many bytes of the host's memory are about to be mapped here, and of 0 when they are not.
        """
        self._room, self._timeout_s, self._check, self._on_room = room, timeout_s, check, on_room
        self._whose = {"generation": generation, "worker": worker, "part": part, "parts": parts}
        self._file: SnapshotFile | None = None
        self._number = 0
        self._older: list[SnapshotFile] = []
        """Files that were outgrown, and whose snapshots others may still need."""
        self._shards: Sequence[Shard] = ()
        self._moves: list[Moves] = []
        self._peers: list[Peer] = []
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._is_done, self._is_given_up = threading.Event(), threading.Event()
        self._is_done.set()
        self._neighbour: Address | None = None
        self._sender: Sender | None = None
        self._unpin: Callable[[], None] = lambda: None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.spent = Spent()

    @property
    def num_bytes(self) -> int:
        """What one snapshot takes in the host's memory, with both its slots."""
        return self._file.num_bytes if self._file is not None else 0

    def prepare(self, shards: Sequence[Shard], text: dict[str, Any]) -> str:
        """Make room for snapshots of `shards` with about such a `text`; return why that cannot be, or nothing."""
        try:
            self._make_room(shards, len(json.dumps(text)))
        except (OSError, KeyError) as error:
            worker, where = self._whose["worker"], self._room.path.parent
            return f"worker {worker} has no room for its snapshots in {where}: {error}"
        self._thread = threading.Thread(target=self._serve, name="snapshots", daemon=True)
        self._thread.start()
        return ""

    def meet(self, peers: Sequence[int]) -> None:
        """Take note of the workers of this generation on this host, once all of them have made room."""
        generation, own = self._whose["generation"], self._whose["worker"]
        self._peers = [Peer(self._room, generation, worker) for worker in peers if worker != own]

    def send_to(self, neighbour: Address) -> str:
        """Have each snapshot sent to a neighbour on another host; return why that cannot be, or nothing."""
        assert self._file is not None, "make room first"
        self._neighbour = neighbour
        self._sender = Sender(self._file, neighbour, timeout_s=self._timeout_s)
        return self._sender.failure

    def take(
        self,
        shards: Sequence[Shard],
        step: int,
        text: Callable[[], dict[str, Any]],
        *,
        began: float | None = None,
    ) -> None:
        """Begin to copy the state after `step`, for which training has waited since `began` (of time.perf_counter).

        `text` is called by the thread. The same list of shards as before is quickest; another may have other slices.
        After `wait` only; until the next, the tensors must not change.
        """
        began = time.perf_counter() if began is None else began
        assert self._file is not None, "make room first"
        assert self._is_done.is_set(), "wait for the copy before"
        self._is_done.clear()
        self.spent = Spent()
        self._orders.put(_Order(shards, step, text, event_of(shards)))
        self.spent.stall_s = time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the copy under way is complete. Raises what went wrong in it, or what `check` raises."""
        began = time.perf_counter()
        until_s = time.monotonic() + self._timeout_s
        while not self._is_done.wait(_LOOK_EVERY_S):
            self._check()
            if time.monotonic() > until_s:
                raise PeerLost(f"the copy of this worker's state has not ended within {self._timeout_s:g} s.")
        self.spent.stall_s += time.perf_counter() - began
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait_delivered(self) -> str:
        """Wait until the last snapshot is with the neighbour; return why it will never be, or nothing."""
        if self._sender is None:
            return ""
        began = time.perf_counter()
        self._sender.wait(self._check)
        self.spent.stall_s += time.perf_counter() - began
        return self._sender.failure

    def close(self, *, removes: bool = False) -> None:
        """Let the copy under way end, and the thread; the file stays unless this `removes` it. Can be called again."""
        self._is_given_up.set()
        self._orders.put(None)
        if self._sender is not None:
            self._sender.close()
        if self._thread is not None:
            self._thread.join(self._timeout_s)
            self._thread = None
        self._unpin()
        self._unpin = lambda: None
        if removes:
            self._remove()
        self._file, self._older, self._peers, self._shards, self._moves = None, [], [], (), []
        self._on_room(0)

    def _remove(self) -> None:
        for file in [*self._older, *([self._file] if self._file is not None else [])]:
            file.remove()

    def _make_room(self, shards: Sequence[Shard], text_bytes: int) -> None:
        """Make a file for snapshots of `shards`; one that there was stays until nobody needs what is in it.

        Raises OSError where there is not enough memory, KeyError where none can hold one of the dtypes.
        """
        generation, worker = self._whose["generation"], self._whose["worker"]
        whose = {**self._whose, "number": self._number}
        layout = lay_out(ordered(shards), whose, text_bytes=max(_LEAST_TEXT_BYTES, 4 * text_bytes))
        self._on_room(layout.file_bytes)
        made = make_file(self._room, path_of(self._room, generation, worker, self._number), layout)
        self._number += 1
        self._unpin()
        self._older += [self._file] if self._file is not None else []
        self._file, self._unpin = made, pin(made, shards)
        self._shards, self._moves = shards, plan_moves(ordered(shards), made)
        if self._sender is not None and self._neighbour is not None:
            self._sender.wait(lambda: None)
            self._sender.close()
            self._sender = Sender(made, self._neighbour, timeout_s=self._timeout_s)

    def _serve(self) -> None:
        """Make the copies that are ordered, until there are no more to make."""
        if self._file is not None:
            self._file.populate()
        while (order := self._orders.get()) is not None:
            began = time.perf_counter()
            try:
                self._make(order)
            except BaseException as error:
                self._error = error
            self.spent.copy_s = time.perf_counter() - began
            self._is_done.set()

    def _make(self, order: _Order) -> None:
        text = json.dumps(order.text()).encode()
        file = self._fitting(order.shards, len(text))
        steps = file.steps()
        slot, newest = steps.index(min(steps)), max(steps)
        if steps[slot] >= 0:
            while not all(peer.has(newest) for peer in self._peers):
                if self._is_given_up.wait(_POLL_S):
                    return
            while self._older:
                self._older.pop().remove()
        file.begin(slot)
        if order.is_computed is None:
            total = self._moves[slot].make()
        else:
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                torch.cuda.current_stream().wait_event(order.is_computed)
                total = self._moves[slot].make()
        file.commit(slot, order.step, total, text)
        if self._sender is not None:
            self._sender.send(slot)

    def _fitting(self, shards: Sequence[Shard], text_bytes: int) -> SnapshotFile:
        """Return the file, with the copies of `shards` planned; a new one where they, or so much text, do not fit."""
        assert self._file is not None, "make room first"
        is_new = shards is not self._shards
        if text_bytes > self._file.layout.text_bytes or (is_new and not self._file.holds(ordered(shards))):
            self._make_room(shards, text_bytes)
        elif is_new:
            self._shards, self._moves = shards, plan_moves(ordered(shards), self._file)
        return self._file
