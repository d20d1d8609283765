"""Reading a map ahead of those who read it at random.

A row that is read for the first time costs a page fault: 0.5 us if its page is in memory, a visit to the storage if
not. The kernel fills maps by large sequential reads far faster (0.14 s a GB from memory; gathering rows at random from
cold storage was 0.1M rows/s before and 7M after, 2026-11). So a thread walks through each part that is touched, beside
those who gather, as long as all of it fits into half of the memory that is free.

Until it comes to a part whose small rows are read at random, the kernel is told to read them alone: by itself it reads
up to 8 MB around each, and the first batch would wait for gigabytes.
"""

import ctypes
import mmap
import queue
import threading
import time
import weakref
from collections import deque
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.fork_lock import ForkLock
from shoal.core.host import memory_bytes

_NORMAL, _RANDOM, _WILL_NEED, _POPULATE_READ = 0, 1, 3, 22  # Linux's numbers; the last is known since 5.14
_PIECE_BYTES = 4 << 20
_IDLE_S = 1.0
_AFTER_S = 0.15
"""The first batch comes before: beside a thread that reads as fast as the storage can, it took 0.65 s instead of 0.21
(1 GB of rows on a cold disk of 1.8 GB/s, 2026-11)."""


class Warmer:
    """Fills maps in the background. The thread ends when there has been nothing to do for a second."""

    def __init__(self) -> None:
        self._arrays: queue.SimpleQueue[NDArray[Any]] = queue.SimpleQueue()
        self._left_bytes = _free_bytes() // 2
        self._given_back: deque[int] = deque()  # a finalizer may run anywhere: it must not wait for a lock
        self._lock = ForkLock()
        self._thread: threading.Thread | None = None

    @property
    def left_bytes(self) -> int:
        """How much more it would fill: what nobody maps any more may be filled again."""
        with self._lock:
            return self._settled()

    def _settled(self) -> int:
        while self._given_back:
            self._left_bytes += self._given_back.popleft()
        return self._left_bytes

    def add(self, array: NDArray[Any], *, is_scattered: bool = False) -> None:
        """Fill the memory that `array`, a view of a map, lies in; nothing if there is no room for it.

        `is_scattered`: until then small rows of it are read at random.
        """
        with self._lock:
            if array.nbytes < _PIECE_BYTES or array.nbytes > self._settled():
                return  # small ones are filled soon enough by those who read them
            self._left_bytes -= array.nbytes
            weakref.finalize(array, self._given_back.append, array.nbytes).atexit = False
            if is_scattered:
                _advise(array, _RANDOM)
            self._arrays.put(array)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="shoal-warmer", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        time.sleep(_AFTER_S)
        while True:
            try:
                array = self._arrays.get(timeout=_IDLE_S)
            except queue.Empty:
                return
            fill(array)


def fill(array: NDArray[np.generic]) -> bool:
    """Have the kernel map all pages of `array`; return whether it does that. Runs without Python's lock."""
    advice = _POPULATE_READ if _advise(array, _NORMAL) else _WILL_NEED
    content = array.reshape(-1).view(np.uint8)
    for begin in range(0, len(content), _PIECE_BYTES):
        piece = content[begin : begin + _PIECE_BYTES]
        if not _advise(piece, advice):
            if advice == _WILL_NEED:
                return False
            advice = _WILL_NEED
            _advise(piece, advice)
    return advice == _POPULATE_READ


def _advise(array: NDArray[np.generic], advice: int) -> bool:
    """Tell the kernel about the pages of `array`, a view of a map; return whether it has understood."""
    madvise = _madvise()
    if madvise is None:
        return False
    begin = array.__array_interface__["data"][0]
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    size = begin + array.nbytes - first
    return bool(madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(advice)) == 0)


@cache
def _madvise() -> Any:
    """Return the system's function; None where it has none."""
    try:
        return ctypes.CDLL(None).madvise
    except (AttributeError, OSError):
        return None


def _free_bytes() -> int:
    """Return how much memory could be had without taking it from anybody."""
    try:
        with open("/proc/meminfo") as file:  # noqa: PTH123
            found = [line for line in file if line.startswith("MemAvailable:")]
        return int(found[0].split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        return memory_bytes() // 2
