"""Memory of every worker that every worker can read and write, and the sum over workers in place, without a copy.

1. Everybody rings "ready" and waits for the others: now nobody writes to the range.
2. Each worker adds up its own slice of the range, chunk by chunk: it reads the chunk of every worker, adds in the order
   of the workers, and writes the sum into everybody's memory while it is still in the core's cache.
3. Everybody rings "done" and waits: now every slice is there.

Example: 2 workers, 64 MB. Worker 0 adds up the first 32 MB, worker 1 the rest; each byte is read once and written once
by one of them: 256 MB of traffic for both, the least there can be if each is to have the sum in its own memory.
"""

import mmap

import torch

from shoal.comm.shm.bells import Bells, bells_bytes, make_bells
from shoal.comm.shm.memory import SharedMap
from shoal.comm.shm.sums import CHUNK_BYTES, Adder, slice_of
from shoal.comm.shm.watch import LINE_BYTES, Watch
from shoal.native.memory import rows_adder

# Rows that begin at the same place of a page are slow to add: the processor takes a load for one that follows a store
# to the same address when only the lowest 12 bits agree.
_SKEW_BYTES = 17 * LINE_BYTES
_MOST_RANGES = 256  # training asks for the same few ranges each step


def _padded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def name_of(dtype: torch.dtype) -> str:
    """Return what errors call it: torch.float32 is float32."""
    return str(dtype).removeprefix("torch.")


def buffer_bytes(row_bytes: int, count: int) -> int:
    """Return the bytes of the memory behind a buffer of `row_bytes` a worker."""
    return _head_bytes(count) + count * _stride_bytes(row_bytes)


def prepare_buffer(memory: SharedMap, count: int) -> None:
    """Initialise the memory behind a buffer. Called by one worker, before the others know of it."""
    make_bells(memory, 0, count)
    make_bells(memory, bells_bytes(count), count)


def _head_bytes(count: int) -> int:
    return _padded(2 * bells_bytes(count), mmap.PAGESIZE)


def _stride_bytes(row_bytes: int) -> int:
    return _padded(max(row_bytes, 1), mmap.PAGESIZE) + _SKEW_BYTES


class SharedBuffer:
    """`numel` elements of each worker; made by `SharedGroup.buffer`."""

    def __init__(
        self, memory: SharedMap, numel: int, dtype: torch.dtype, *, index: int, count: int, watch: Watch
    ) -> None:
        self.numel, self.dtype = numel, dtype
        self._memory, self._index, self._count, self._adder = memory, index, count, Adder(dtype)
        head, stride = _head_bytes(count), _stride_bytes(numel * dtype.itemsize)
        self._span = head + index * stride, head + (index + 1) * stride
        self.rows = [
            torch.frombuffer(memory.map, dtype=dtype, count=numel, offset=head + worker * stride)
            if numel
            else torch.empty(0, dtype=dtype)
            for worker in range(count)
        ]
        """The memory of each worker."""
        self.tensor = self.rows[index]
        """The memory of this worker."""
        self.ready = Bells(memory, 0, index=index, count=count, watch=watch)
        self.done = Bells(memory, bells_bytes(count), index=index, count=count, watch=watch)
        self._add_rows = rows_adder(self.rows) if numel else None
        self._pieces: dict[tuple[int, int], list[list[torch.Tensor]]] = {}

    def populate_own(self) -> None:
        """Take the pages of this worker's memory: by its first user, so that they lie near its core."""
        self._memory.populate(*self._span)

    def populate_all(self) -> None:
        """Map the pages of everybody's memory, once they are taken."""
        self._memory.populate(0, len(self._memory.map))

    def all_reduce(self, begin: int = 0, end: int | None = None) -> None:
        """Put the sum over all workers of elements [begin, end) into the memory of each.

        Called by every worker of the group, with the same range. Raises PeerLost when one is lost; the range is then
        undefined, and the group is of no more use.
        """
        end = self.numel if end is None else end
        self.ready.ring()
        self.ready.wait("all_reduce of shared memory")
        self.reduce_slice(begin, end)
        self.done.ring()
        self.done.wait("all_reduce of shared memory")

    def reduce_slice(self, begin: int, end: int) -> None:
        """Put the sum over all workers of this worker's slice of [begin, end) into the memory of each.

        Only while all workers are at it, or wait: between "ready" of all and "done" of all.
        """
        if self._add_rows is not None:
            self._add_rows(*slice_of(begin, end, index=self._index, count=self._count))
            return
        for rows in self._pieces_of(begin, end):
            self._adder.add(rows, out=rows[0])
            for row in rows[1:]:
                row.copy_(rows[0])

    def _pieces_of(self, begin: int, end: int) -> list[list[torch.Tensor]]:
        """Return the rows of each chunk of this worker's slice; kept, for making views takes as long as adding."""
        pieces = self._pieces.get((begin, end))
        if pieces is None:
            if len(self._pieces) >= _MOST_RANGES:
                self._pieces.clear()
            first, last = slice_of(begin, end, index=self._index, count=self._count)
            step = CHUNK_BYTES // self.dtype.itemsize
            pieces = [[row[at : min(at + step, last)] for row in self.rows] for at in range(first, last, step)]
            self._pieces[begin, end] = pieces
        return pieces
