"""Columns of a part that go into its file while the part is made.

1. Where a column's values will lie in the file is known before its rows are, if nothing before them depends on what the
   rows hold (see `places` in part_file.py): they are written there as they come, a piece or two behind, by a thread.
2. The thread that appends sums them up meanwhile: neither needs Python's lock.
3. At the end a column is padded with zeros as Arrow pads it, and mapped, so that Arrow can be given it as a buffer.

Example: 4,000 JPEGs of 45 kB, one column. Their 180 MB begin behind a header of 328 bytes and 4,001 offsets, at byte
32,336: pieces of 4 MB are written from there on, and the header and the offsets when the last image is in the file.
"""

import contextlib
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shoal.data.pack.checksum import Checksum

ALIGNMENT = 64
_MOST_WAITING = 2
"""Pieces on their way to the file: while one is written, the next is there."""


def write_at(handle: int, content: Any, place: int) -> None:
    """Write all of `content` into an open file."""
    left = memoryview(content)
    while left:
        count = os.pwrite(handle, left, place)
        left, place = left[count:], place + count


class PartStream:
    """A part's file that is being written."""

    def __init__(self, path: Path, writer: ThreadPoolExecutor) -> None:
        self._writer = writer
        self._waiting: deque[Future[None]] = deque()
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

    def write(self, content: NDArray[np.uint8], place: int) -> None:
        """Have `content` written, which nobody may change any more; what failed of earlier pieces is raised."""
        self._waiting.append(self._writer.submit(write_at, self._handle, content, place))
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft().result()

    def mapped(self) -> mmap.mmap:
        """Return what is in the file, when all of it is."""
        while self._waiting:
            self._waiting.popleft().result()
        return mmap.mmap(self._handle, 0, access=mmap.ACCESS_READ)

    def close(self) -> None:
        """Close the file, whatever became of it."""
        for piece in self._waiting:
            with contextlib.suppress(OSError):
                piece.result()
        self._waiting.clear()
        os.close(self._handle)


class Streamed:
    """The values of a column, in a file from `place` on."""

    def __init__(self, stream: PartStream, dtype: np.dtype[Any], place: int) -> None:
        self._stream, self._dtype, self.place = stream, dtype, place
        self.checksum = Checksum()
        self.count = 0
        self.num_bytes = 0

    def append(self, more: NDArray[Any]) -> None:
        """Write more values behind those that are there."""
        self.count += more.size
        self._append(np.ascontiguousarray(more, self._dtype).reshape(-1).view(np.uint8))

    def _append(self, content: NDArray[np.uint8]) -> None:
        self._stream.write(content, self.place + self.num_bytes)
        self.checksum.update(content.data)
        self.num_bytes += content.size

    def read(self) -> NDArray[Any]:
        """Return all values, as they are in the file."""
        if self.num_bytes == 0:
            return np.empty(0, self._dtype)
        return np.frombuffer(self._stream.mapped(), self._dtype, self.count, self.place)

    def buffer(self) -> pa.Buffer:
        """Return all values, with zeros up to a multiple of 64 bytes, as Arrow writes them; nothing may follow."""
        self._append(np.zeros(-self.num_bytes % ALIGNMENT, np.uint8))
        if self.num_bytes == 0:
            return pa.py_buffer(b"")
        return pa.py_buffer(memoryview(self._stream.mapped())[self.place : self.place + self.num_bytes])
