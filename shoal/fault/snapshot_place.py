"""Where the snapshots of workers lie in the room of their host, and how workers follow each other's.

    generation-3-worker-1-room-0.snapshot

A worker has one file; where its state outgrows that (an optimizer may get state for a parameter only later), it makes
the next, with a higher number, and the one before goes when all workers have a newer step. One that keeps no snapshots
any more removes its files: with that those who wait for it learn it.
"""

import re
from pathlib import Path

from shoal.comm.shm.kept import Room
from shoal.fault.snapshot_file import SUFFIX, SnapshotReader

_NAME = re.compile(rf"generation-(\d+)-worker-(\d+)-room-(\d+){SUFFIX}")


class NoneKept(Exception):
    """Another worker of this host keeps no snapshots any more: those of one step would never be whole."""


def path_of(room: Room, generation: int, worker: int, number: int = 0) -> Path:
    """Return the file of a worker's snapshots, the one of that number."""
    return room.path / f"generation-{generation}-worker-{worker}-room-{number}{SUFFIX}"


def remove_older(room: Room, generation: int) -> None:
    """Remove the snapshots of generations before `generation`: whoever takes part in that has its state."""
    for path in room.path.glob(f"*{SUFFIX}"):
        found = _NAME.fullmatch(path.name)
        if found is not None and int(found[1]) < generation:
            path.unlink(missing_ok=True)


class Peer:
    """The snapshots of another worker of this host, seen from this one."""

    def __init__(self, room: Room, generation: int, worker: int) -> None:
        """Find its first file, which is there."""
        self._where, self._number = (room, generation, worker), 0
        self._reader = SnapshotReader(path_of(*self._where))

    def has(self, step: int) -> bool:
        """Return whether it has a complete snapshot of `step` or a later one. Raises NoneKept if it never will."""
        while max(self._reader.steps()) < step:
            following = path_of(*self._where, self._number + 1)
            if following.exists():
                self._number, self._reader = self._number + 1, SnapshotReader(following)
            elif not self._reader.path.exists() and not following.exists():
                raise NoneKept(f"worker {self._where[2]} keeps no snapshots any more")
            else:
                return False
        return True
