"""Batches gathered by threads of C, which are handed over by one call each (gather_ring.c says how)."""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError
from shoal.native.gather import Parts
from shoal.native.library import library

MOST_AHEAD = 62
"""How many batches may be gathered before they are asked for: the ring has 64 slots."""
NOT_YET, FAILED = -1, -2
_WAIT_NS = 100_000_000
"""How long a call waits before it comes back to Python, which may have been interrupted."""


@dataclass(frozen=True)
class RingColumn:
    """What is gathered for each sample: a row of its part, or a window of `width` tokens, as int64."""

    parts: Parts
    width: int = 0
    stride: int = 1
    """How many tokens a window begins after the one before."""


@dataclass(frozen=True, kw_only=True)
class RingSchedule:
    """Which positions of an epoch are gathered for which step, and which samples stand there."""

    num_samples: int
    batch_size: int
    steps_per_epoch: int
    part: tuple[int, int]
    """Of a whole batch: the positions [begin, end), counted from its first."""
    last_part: tuple[int, int]
    """The same of the last batch of an epoch, which may be shorter."""
    steps: range
    grid: tuple[int, int] | None
    """Of the order (shoal/data/order.py); None: samples come as they lie."""
    num_keys: int
    starts: NDArray[np.int64]
    """Part p of the pack holds samples [starts[p], starts[p + 1])."""


class Ring:
    """The batches of consecutive steps, in order. Its threads end with `close`, at the latest with this object."""

    def __init__(self, columns: Sequence[RingColumn], schedule: RingSchedule) -> None:
        native = _typed()
        assert native is not None, "without the library there is no ring"
        self._native = native
        self._alive = columns, schedule  # C reads their arrays
        self._num_columns = len(columns)
        self._times = (ctypes.c_int64 * 2)()
        self._slots: list[Sequence[NDArray[Any]]] = []
        table = (_Column * len(columns))(*map(_column, columns))
        self._ring = native.shoal_ring_open(table, len(columns), ctypes.byref(_schedule(schedule)))
        if not self._ring:
            raise DataError(f"there is no ring of {len(columns)} columns over {len(schedule.starts) - 1} parts.")
        weakref.finalize(self, native.shoal_ring_free, self._ring).atexit = False  # somebody may still be in a call
        # Also when the interpreter ends: threads of C would go on and write into what is gone.
        self.close = weakref.finalize(self, native.shoal_ring_stop, self._ring)

    def add_slot(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Add memory for a batch: an array a column, of the size that a whole batch has there."""
        assert len(arrays) == self._num_columns
        pointers = (ctypes.c_void_p * len(arrays))(*(array.__array_interface__["data"][0] for array in arrays))
        self._slots.append(arrays)
        assert self._native.shoal_ring_add_slot(self._ring, pointers) == len(self._slots)

    def set_keys(self, epoch: int, keys: NDArray[np.uint64]) -> None:
        """Say how an epoch is shuffled. Those of two epochs are kept: of the one at hand, and of the next."""
        keys = np.ascontiguousarray(keys, dtype=np.uint64)
        self._native.shoal_ring_set_keys(self._ring, epoch, keys.__array_interface__["data"][0])

    def set_pace(self, *, ahead: int, threads: int, does_help: bool) -> None:
        """Have `threads` gather up to `ahead` batches early; the one who asks gathers too if it `does_help`."""
        self._native.shoal_ring_set_pace(self._ring, ahead, threads, does_help)

    def next(self) -> int:
        """Give the batch before back, and return the slot of the next one.

        NOT_YET: ask again; FAILED: a sample of the batch lies outside its part.
        """
        slot: int = self._native.shoal_ring_next(self._ring, _WAIT_NS)
        return slot

    def times_s(self) -> tuple[float, float]:
        """Return how long calls of `next` took so far, and how long all threads together have gathered."""
        self._native.shoal_ring_times(self._ring, self._times)
        return self._times[0] * 1e-9, self._times[1] * 1e-9


class _Column(ctypes.Structure):
    _fields_ = (
        ("bases", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("item_bytes", ctypes.c_int64),
        ("is_signed", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


class _Schedule(ctypes.Structure):
    _fields_ = (
        ("num_samples", ctypes.c_int64),
        ("batch_size", ctypes.c_int64),
        ("steps_per_epoch", ctypes.c_int64),
        ("begin", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("last_begin", ctypes.c_int64),
        ("last_count", ctypes.c_int64),
        ("first_step", ctypes.c_int64),
        ("last_step", ctypes.c_int64),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
        ("num_keys", ctypes.c_uint64),
        ("starts", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
    )


def _column(column: RingColumn) -> _Column:
    parts = column.parts
    is_signed = parts.dtype is not None and parts.dtype.kind == "i"
    return _Column(*parts.table, parts.item_bytes, is_signed, column.width, column.stride)


def _schedule(schedule: RingSchedule) -> _Schedule:
    (begin, end), (last_begin, last_end) = schedule.part, schedule.last_part
    assert schedule.starts.dtype == np.int64, schedule.starts.dtype
    return _Schedule(
        *(schedule.num_samples, schedule.batch_size, schedule.steps_per_epoch),
        *(begin, end - begin, last_begin, last_end - last_begin),
        *(schedule.steps.start, schedule.steps.stop),
        *(schedule.grid or (0, 0)),
        *(schedule.num_keys, schedule.starts.__array_interface__["data"][0], len(schedule.starts) - 1),
    )


@cache
def _typed() -> ctypes.CDLL | None:
    """Return the library, told what the functions of a ring take and return."""
    native = library()
    if native is None:
        return None
    pointer, number, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
    functions: dict[str, tuple[list[Any], Any]] = {
        "shoal_ring_open": ([pointer, size, pointer], pointer),
        "shoal_ring_add_slot": ([pointer, pointer], ctypes.c_int),
        "shoal_ring_set_keys": ([pointer, number, pointer], None),
        "shoal_ring_set_pace": ([pointer, number, ctypes.c_int, ctypes.c_int], None),
        "shoal_ring_next": ([pointer, number], ctypes.c_int),
        "shoal_ring_times": ([pointer, pointer], None),
        "shoal_ring_stop": ([pointer], None),
        "shoal_ring_free": ([pointer], None),
    }
    for name, (takes, gives) in functions.items():
        function = getattr(native, name)
        function.argtypes, function.restype = takes, gives
    return native


def is_available() -> bool:
    """Whether shoal was installed with its C part."""
    return library() is not None
