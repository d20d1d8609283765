"""The order of samples and the part of a pack that a row lies in, for many samples at once."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.native.library import library


def permute(
    positions: NDArray[np.int64], *, num_samples: int, grid: tuple[int, int], keys: NDArray[np.uint64]
) -> NDArray[np.int64] | None:
    """Return the sample at each of `positions` as shoal/data/order.py defines it; None without the library.

    The positions lie in [0, num_samples), and num_samples <= grid[0] * grid[1].
    """
    native = library()
    if native is None:
        return None
    positions = np.ascontiguousarray(positions, dtype=np.int64)
    samples = np.empty_like(positions)
    sizes = [ctypes.c_uint64(number) for number in (num_samples, *grid)]
    counts = ctypes.c_size_t(len(positions)), ctypes.c_size_t(len(keys))
    native.shoal_permute(_at(positions), _at(samples), counts[0], *sizes, _at(keys), counts[1])
    return samples


def locate(rows: NDArray[np.int64], starts: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the part that each row lies in, and its number there; part p holds rows [starts[p], starts[p + 1]).

    Raises IndexError for a row that lies in none.
    """
    native = library()
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    part, inside = np.empty(len(rows), dtype=np.int32), np.empty_like(rows)
    if native is None:
        found = _locate_plainly(rows, starts, part, inside)
    else:
        native.shoal_locate.restype = ctypes.c_size_t
        counts = ctypes.c_size_t(len(rows)), ctypes.c_size_t(len(starts) - 1)
        found = native.shoal_locate(_at(rows), counts[0], _at(starts), counts[1], _at(part), _at(inside))
    if found < len(rows):
        raise IndexError(f"row {rows[found]} of {starts[-1]}")
    return part, inside


def _locate_plainly(
    rows: NDArray[np.int64], starts: NDArray[np.int64], part: NDArray[np.int32], inside: NDArray[np.int64]
) -> int:
    outside = np.flatnonzero((rows < 0) | (rows >= starts[-1]))
    if len(outside):
        return int(outside[0])
    part[:] = np.searchsorted(starts, rows, side="right") - 1
    inside[:] = rows - starts[part]
    return len(rows)


def _at(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.__array_interface__["data"][0])
