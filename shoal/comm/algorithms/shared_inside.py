"""The inner level of `two_level` where the workers of a host meet in its memory: a bucket goes in once and out once.

The bucket lies in the engine's memory, so it is copied. Every worker has a row in shared memory that all can read:
room for a whole bucket, and behind it room for one part of a sum.

1. Reduce-scatter: each copies its bucket into its row and tells the others. When all are there, it adds up its own part
   of all rows, in the order of the workers, straight into its bucket.
2. All-gather: each copies its part, which has meanwhile been summed between hosts, behind the bucket of its row, and
   tells the others. When all are there, it copies the others' parts into its bucket.

A row may be filled again as soon as the call before is over here: whoever has told of its sum has read all buckets, and
whoever tells of its next bucket has read all sums. So two kinds of bells are enough, and no barrier.

Example: 2 workers, 4 MB. Worker 0 copies 4 MB in, adds up the first 2 MB of both rows, has them summed with another
host, copies these 2 MB in and the other 2 MB out: 8 MB through memory, and none through a socket of its host.
"""

import torch

from shoal.comm.algorithms.steps import part
from shoal.comm.algorithms.two_level import Inside
from shoal.comm.shm.buffer import SharedBuffer
from shoal.comm.shm.group import SharedGroup
from shoal.comm.shm.sums import CHUNK_BYTES, Adder


def over_shared(group: SharedGroup) -> Inside:
    """Return the workers of `group`, as the inner level. One thread at a time uses both.

    What it returns raises PeerLost when one of them is lost; the numbers are then undefined.
    """
    rows = _Rows(group)
    return Inside(index=group.index, count=group.count, reduce_scatter=rows.reduce_scatter, all_gather=rows.all_gather)


class _Rows:
    """The rows of a host's workers; for each dtype as large as its largest bucket so far."""

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        self._rooms: dict[torch.dtype, tuple[int, SharedBuffer, Adder]] = {}

    def reduce_scatter(self, numbers: torch.Tensor) -> None:
        """See Inside. Called by every worker of the group, each time followed by `all_gather`."""
        _, buffer, adder = self._room(numbers)
        buffer.tensor[: numbers.numel()].copy_(numbers)
        buffer.ready.ring()
        buffer.ready.wait("the sum of gradients inside its host")
        begin, end = self._part(numbers, self._group.index)
        step = CHUNK_BYTES // numbers.itemsize
        for at in range(begin, end, step):
            until = min(at + step, end)
            adder.add([row[at:until] for row in buffer.rows], out=numbers[at:until])

    def all_gather(self, numbers: torch.Tensor) -> None:
        """See Inside. Called by every worker of the group."""
        most, buffer, _ = self._room(numbers)
        begin, end = self._part(numbers, self._group.index)
        buffer.tensor[most : most + end - begin].copy_(numbers[begin:end])
        buffer.done.ring()
        buffer.done.wait("gathering the sums of gradients inside its host")
        for other, row in enumerate(buffer.rows):
            if other != self._group.index:
                begin, end = self._part(numbers, other)
                numbers[begin:end].copy_(row[most : most + end - begin])

    def _part(self, numbers: torch.Tensor, worker: int) -> tuple[int, int]:
        return part(numbers.numel(), worker, self._group.count)

    def _room(self, numbers: torch.Tensor) -> tuple[int, SharedBuffer, Adder]:
        """Return how large a bucket may be, the rows and what adds them. All workers ask for the same at once."""
        room = self._rooms.get(numbers.dtype)
        if room is None or room[0] < numbers.numel():
            most = numbers.numel()
            each = -(-most // self._group.count)
            room = most, self._group.buffer(most + each, numbers.dtype), Adder(numbers.dtype)
            self._rooms[numbers.dtype] = room
        return room
