"""The files that are arriving at this node: how far each has come, for those who pass it on meanwhile.

The last byte of a file is held back until its checksum is right: nobody further down the chain ends up with a wrong
file because of us. When a file turns out wrong, it begins again under a new number (`turn`), in a new file.
"""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from shoal.data.pack.checksum import Checksum

PIECE_BYTES = 512 << 10
"""What is read, checksummed, written and offered to the next node at once: 4 ms at 1 Gb/s, which each further node of a
chain adds to the time until it has all. The same as comm's messages."""


class Mismatch(Exception):
    """What has arrived is not what the manifest says."""


@dataclass(frozen=True)
class Offer:
    """What can be passed on of a file."""

    path: Path
    """Where its bytes are: they stay readable, once opened, whatever becomes of the name."""
    turn: int
    ready_bytes: int
    is_whole: bool = False
    is_refused: bool = False
    """Whether this node will not have the file."""


class Arrival:
    """One file on its way. Its fields change under the lock of Arrivals."""

    def __init__(self, final: Path, num_bytes: int, checksum: str) -> None:
        self.final, self.num_bytes, self.checksum = final, num_bytes, checksum
        self.turn, self.arrived_bytes = 0, 0
        self.is_done, self.is_refused = final.exists(), False

    @property
    def partial(self) -> Path:
        """Return where it is written until it is whole and right."""
        return self.final.with_name(f"{self.final.name}.{self.turn}.partial")

    def offer(self) -> Offer:
        """Return what can be passed on now."""
        if self.is_done:
            return Offer(self.final, self.turn, self.num_bytes, is_whole=True)
        ready_bytes = max(0, min(self.arrived_bytes, self.num_bytes - 1))
        return Offer(self.partial, self.turn, ready_bytes, is_refused=self.is_refused)


class Arrivals:
    """All files that this node fetches, by their names in the pack."""

    def __init__(self) -> None:
        self._files: dict[str, Arrival] = {}
        self._changed = threading.Condition()

    def expect(self, name: str, final: Path, num_bytes: int, checksum: str) -> Arrival:
        """Say that file `name` will come, and return it."""
        with self._changed:
            return self._files.setdefault(name, Arrival(final, num_bytes, checksum))

    def refuse(self, name: str) -> None:
        """Say that file `name` will not come after all."""
        with self._changed:
            self._files[name].is_refused = True
            self._changed.notify_all()

    def offer(self, name: str, *, turn: int | None, sent_bytes: int, timeout_s: float) -> Offer | None:
        """Return what there is of file `name`, once it is more than `sent_bytes` of `turn`, or another turn's.

        None after `timeout_s` without that. A name that nobody expects is refused.
        """
        with self._changed:
            arrival = self._files.get(name)
            if arrival is None:
                return Offer(Path(), 0, 0, is_refused=True)

            def is_new() -> bool:
                now = arrival.offer()
                is_other = turn is not None and now.turn != turn
                return now.is_refused or now.is_whole or is_other or now.ready_bytes > sent_bytes

            return arrival.offer() if self._changed.wait_for(is_new, timeout_s) else None

    def changed(self) -> threading.Condition:
        """Return what is notified whenever more of any file is there."""
        return self._changed


class Incoming:
    """One try at a file: takes its bytes, and at the end says whether they are the right ones."""

    def __init__(self, arrival: Arrival, changed: threading.Condition) -> None:
        self._arrival, self._changed = arrival, changed
        self._handle, self._checksum = -1, Checksum()
        self.begin()

    def begin(self) -> None:
        """Begin, or begin again from the first byte."""
        self.drop()
        with self._changed:
            self._arrival.turn += 1
            self._checksum = Checksum()
            self._handle = os.open(self._arrival.partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        if hasattr(os, "posix_fallocate") and self._arrival.num_bytes > 0:
            try:
                os.posix_fallocate(self._handle, 0, self._arrival.num_bytes)  # a full disk is found now, not half way
            except OSError:
                self.drop()
                raise

    def write(self, piece: memoryview) -> None:
        """Take the next bytes."""
        if self._arrival.arrived_bytes + len(piece) > self._arrival.num_bytes:
            raise Mismatch(f"more than the {self._arrival.num_bytes} bytes of the manifest")
        self._checksum.update(piece)
        rest = piece
        while rest:
            rest = rest[os.write(self._handle, rest) :]
        with self._changed:
            self._arrival.arrived_bytes += len(piece)
            self._changed.notify_all()

    def finish(self) -> None:
        """Give the file its name if it is right, or raise Mismatch."""
        arrival = self._arrival
        if arrival.arrived_bytes != arrival.num_bytes:
            raise Mismatch(f"{arrival.arrived_bytes} bytes instead of {arrival.num_bytes}")
        if self._checksum.hex() != arrival.checksum:
            raise Mismatch(f"checksum {self._checksum.hex()} instead of {arrival.checksum}")
        os.close(self._handle)
        self._handle = -1
        with self._changed:
            arrival.partial.replace(arrival.final)
            arrival.is_done = True
            self._changed.notify_all()

    def drop(self) -> None:
        """Forget what has come. Nothing happens after `finish`."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
            with self._changed:
                self._arrival.partial.unlink(missing_ok=True)
                self._arrival.turn += 1
                self._arrival.arrived_bytes = 0
                self._changed.notify_all()
