"""Reading a map ahead of those who read it at random.

A row that is read for the first time costs a page fault: 0.5 us if its page is in memory, a visit to the storage if
not. The kernel fills maps by large sequential reads far faster (0.14 s a GB from memory; gathering rows at random from
cold storage was 0.1M rows/s before and 7M after, 2026-11). So a thread walks through each part that is touched, beside
those who gather, as long as all of it fits into half of the memory that is free.
"""

import ctypes
import mmap
import queue
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.fork_lock import ForkLock
from shoal.core.host import memory_bytes

_POPULATE_READ, _WILL_NEED = 22, 3  # Linux's numbers; the first is known since 5.14
_PIECE_BYTES = 4 << 20
_IDLE_S = 1.0


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

    def add(self, array: NDArray[Any]) -> None:
        """Fill the memory that `array`, a view of a map, lies in; nothing if there is no room for it."""
        with self._lock:
            if array.nbytes < _PIECE_BYTES or array.nbytes > self._settled():
                return  # small ones are filled soon enough by those who read them
            self._left_bytes -= array.nbytes
            weakref.finalize(array, self._given_back.append, array.nbytes).atexit = False
            self._arrays.put(array)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="shoal-warmer", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                array = self._arrays.get(timeout=_IDLE_S)
            except queue.Empty:
                return
            fill(array)


def fill(array: NDArray[np.generic]) -> bool:
    """Have the kernel map all pages of `array`; return whether it does that. Runs without Python's lock."""
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (AttributeError, OSError):
        return False
    first = array.__array_interface__["data"][0] // mmap.PAGESIZE * mmap.PAGESIZE
    end = array.__array_interface__["data"][0] + array.nbytes
    advice = _POPULATE_READ
    for at in range(first, end, _PIECE_BYTES):
        piece = ctypes.c_void_p(at), ctypes.c_size_t(min(_PIECE_BYTES, end - at))
        if madvise(*piece, ctypes.c_int(advice)) != 0:
            if advice == _WILL_NEED:
                return False
            advice = _WILL_NEED
            madvise(*piece, ctypes.c_int(advice))
    return advice == _POPULATE_READ


def _free_bytes() -> int:
    """Return how much memory could be had without taking it from anybody."""
    try:
        with open("/proc/meminfo") as file:  # noqa: PTH123
            found = [line for line in file if line.startswith("MemAvailable:")]
        return int(found[0].split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        return memory_bytes() // 2
