"""Rows, windows of tokens and variable rows from anywhere in the parts of a pack, into one buffer by one call a batch.

1. `Parts` keeps the address and length of each part's buffer, so that a call costs the same for 1 part and for 1,000.
2. Position i of a batch is item `row[i]` of part `part[i]` (`part` None: all in part 0). C checks that before it reads.
3. Rows are asked of memory 12 ahead of the one that is copied, and a large batch is cut over `threads`.

Two parts of three rows, rows [[0, 0], [1, 1], [2, 2]] and [[3, 3], [4, 4], [5, 5]]:
gather_parts(parts, part=[1, 0, 1], row=[2, 0, 0], out) leaves [[5, 5], [0, 0], [3, 3]] in `out`.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError
from shoal.native.library import library

Array = NDArray[Any]
Indices = NDArray[np.int64]
PartNumbers = NDArray[np.int32]


class Parts:
    """The buffers of one column, one a part, ready for C. A part that comes later is None and has no rows yet."""

    def __init__(self, arrays: Sequence[Array | None]) -> None:
        self.arrays: list[Array | None] = [None] * len(arrays)
        self.addresses = np.zeros(len(arrays), np.uint64)
        self.lengths = np.zeros(len(arrays), np.int64)
        self.table = (_address(self.addresses), _address(self.lengths), len(arrays))
        self.dtype: np.dtype[Any] | None = None
        self.shape: tuple[int, ...] = ()
        for number, array in enumerate(arrays):
            if array is not None:
                self[number] = array

    def __len__(self) -> int:
        return len(self.arrays)

    def __setitem__(self, number: int, array: Array) -> None:
        if not array.flags.c_contiguous or array.ndim == 0:
            raise DataError(f"Part {number} is not one contiguous buffer of rows. Pass numpy.ascontiguousarray of it.")
        if self.dtype is None:
            self.dtype, self.shape = array.dtype, array.shape[1:]
        if (array.dtype, array.shape[1:]) != (self.dtype, self.shape):
            raise DataError(
                f"Part {number} has rows of {array.dtype}{list(array.shape[1:])} where the others have "
                f"{self.dtype}{list(self.shape)}: the parts of a column are alike."
            )
        self.arrays[number] = array
        self.addresses[number], self.lengths[number] = _address(array), len(array)

    @property
    def item_bytes(self) -> int:
        """Bytes of one row (of one token, of a stream)."""
        return 0 if self.dtype is None else self.dtype.itemsize * math.prod(self.shape)


Buffers = Parts | Sequence[Array | None]  # one a part


def gather_rows(source: Array, rows: Indices, out: Array, *, threads: int = 1) -> None:
    """Put source[rows[i]] into out[i], for every i."""
    gather_parts(Parts([source]), None, rows, out, threads=threads)


def gather_parts(bases: Buffers, part: PartNumbers | None, row: Indices, out: Array, *, threads: int = 1) -> None:
    """Put row `row[i]` of part `part[i]` into out[i], for every i. On a DataError `out` is undefined."""
    parts = _parts(bases)
    part, row = _positions(part, row)
    if parts.dtype is not None and (out.dtype, out.shape) != (parts.dtype, (len(row), *parts.shape)):
        raise DataError(
            f"{len(row)} rows of {parts.dtype}{list(parts.shape)} do not go into {out.dtype}{list(out.shape)}. "
            f"Pass an array of {parts.dtype}{[len(row), *parts.shape]}."
        )
    _writable(out)
    native = library()
    if native is None:
        _refuse_outside(parts, part, row, 1)
        for number, chosen in _by_part(parts, part, row):
            out[chosen] = number[row[chosen]]
        return
    outside = _typed(native).shoal_gather_parts(
        *parts.table, *_addresses(part, row), len(row), parts.item_bytes, _address(out), threads
    )
    if outside >= 0:
        raise _outside(parts, part, row, outside, 1)


def gather_windows(
    streams: Buffers,
    part: PartNumbers | None,
    start: Indices,
    out: NDArray[np.int64],
    *,
    threads: int = 1,
) -> None:
    """Put the tokens [start[i], start[i] + width) of stream part[i] into out[i], as int64; `out` is [count, width]."""
    parts = _parts(streams)
    part, start = _positions(part, start)
    if parts.dtype is not None and (parts.dtype.kind not in "iu" or parts.shape):
        raise DataError(f"Windows are of integer tokens; this column holds {parts.dtype}{list(parts.shape)}.")
    if out.dtype != np.int64 or out.ndim != 2 or len(out) != len(start):
        raise DataError(f"{len(start)} windows do not go into {out.dtype}{list(out.shape)}. Pass int64 [count, width].")
    _writable(out)
    width, native = out.shape[1], library()
    if native is None:
        _refuse_outside(parts, part, start, width)
        for stream, chosen in _by_part(parts, part, start):
            out[chosen] = stream[start[chosen, None] + np.arange(width)]
        return
    token = parts.dtype or np.dtype(np.int64)
    outside = _typed(native).shoal_gather_windows(
        *(*parts.table, *_addresses(part, start), len(start), width),
        *(token.itemsize, token.kind == "i", _address(out), threads),
    )
    if outside >= 0:
        raise _outside(parts, part, start, outside, width)


def gather_bytes(
    values: Buffers,
    offsets: Buffers,
    part: PartNumbers | None,
    row: Indices,
    *,
    threads: int = 1,
) -> tuple[Array, Indices]:
    """Return variable rows one after another in one array, and where each begins in it (one offset more than rows).

    Row r of a part is values[offsets[r]:offsets[r + 1]]; values are of any dtype.
    """
    parts, bounds = _parts(values), _parts(offsets)
    part, row = _positions(part, row)
    num_rows = np.maximum(bounds.lengths - 1, 0)
    out_offsets = np.zeros(len(row) + 1, np.int64)
    native = library()
    if native is None:
        return _gather_bytes_by_numpy(parts, bounds, part, row, out_offsets)
    positions = (*_addresses(part, row), len(row))
    wrong = _typed(native).shoal_ragged_offsets(
        bounds.table[0], _address(num_rows), parts.table[1], len(parts), *positions, _address(out_offsets)
    )
    if wrong >= 0:
        raise _wrong_row(part, row, wrong, num_rows)
    out = np.empty((int(out_offsets[-1]), *parts.shape), parts.dtype or np.uint8)
    native.shoal_gather_ragged(
        *(parts.table[0], bounds.table[0], len(parts), *positions),
        *(parts.item_bytes, _address(out_offsets), _address(out), threads),
    )
    return out, out_offsets


def _gather_bytes_by_numpy(
    parts: Parts, bounds: Parts, part: PartNumbers | None, row: Indices, out_offsets: Indices
) -> tuple[Array, Indices]:
    found = [np.empty((0, *parts.shape), parts.dtype or np.uint8)]
    num_rows = np.maximum(bounds.lengths - 1, 0)
    for i, at in enumerate(row):
        number = 0 if part is None else int(part[i])
        if not (0 <= number < len(parts) and 0 <= at < num_rows[number]):
            raise _wrong_row(part, row, i, num_rows)
        array, bound = parts.arrays[number], bounds.arrays[number]
        begin, end = (0, 0) if bound is None else (int(bound[at]), int(bound[at + 1]))
        if array is None or not 0 <= begin <= end <= len(array):
            raise _wrong_row(part, row, i, num_rows)
        found.append(array[begin:end])
        out_offsets[i + 1] = out_offsets[i] + end - begin
    return np.concatenate(found), out_offsets


def _parts(given: Buffers) -> Parts:
    return given if isinstance(given, Parts) else Parts(given)


def _positions(part: PartNumbers | None, row: Indices) -> tuple[PartNumbers | None, Indices]:
    if part is not None and len(part) != len(row):
        raise DataError(f"{len(part)} parts were named for {len(row)} rows; each row has one part.")
    return None if part is None else np.ascontiguousarray(part, np.int32), np.ascontiguousarray(row, np.int64)


def _writable(out: Array) -> None:
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise DataError("A batch goes into one contiguous, writable array; this one is a view with gaps or read-only.")


def _by_part(parts: Parts, part: PartNumbers | None, row: Indices) -> list[tuple[Array, NDArray[np.intp]]]:
    """Return the array of each part that is asked for, with the positions that ask for it."""
    numbers = np.zeros(len(row), np.int32) if part is None else part
    return [
        (array, np.flatnonzero(numbers == number)) for number, array in enumerate(parts.arrays) if array is not None
    ]


def _refuse_outside(parts: Parts, part: PartNumbers | None, row: Indices, width: int) -> None:
    numbers = np.zeros(len(row), np.int32) if part is None else part
    lengths = np.append(parts.lengths, 0)[np.where((numbers >= 0) & (numbers < len(parts)), numbers, len(parts))]
    if (wrong := np.flatnonzero((row < 0) | (row > lengths - width))).size:
        raise _outside(parts, part, row, int(wrong[0]), width)


def _outside(parts: Parts, part: PartNumbers | None, row: Indices, at: int, width: int) -> DataError:
    number = 0 if part is None else int(part[at])
    if not 0 <= number < len(parts):
        return DataError(f"Position {at} of the batch asks for part {number}; there are {len(parts)} parts.")
    asked = f"row {row[at]}" if width == 1 else f"[{row[at]}, {int(row[at]) + width})"
    return DataError(
        f"Position {at} of the batch asks for {asked} of part {number}, which has {parts.lengths[number]}."
    )


def _wrong_row(part: PartNumbers | None, row: Indices, at: int, num_rows: Indices) -> DataError:
    number = 0 if part is None else int(part[at])
    if not 0 <= number < len(num_rows) or not 0 <= row[at] < num_rows[number]:
        return DataError(f"Position {at} of the batch asks for row {row[at]} of part {number}, which is not there.")
    return DataError(f"Row {row[at]} of part {number} has offsets that point outside its buffer: the part is damaged.")


def _addresses(part: PartNumbers | None, row: Indices) -> tuple[int | None, int]:
    return None if part is None else _address(part), _address(row)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])  # a fifth of what array.ctypes.data costs


@cache
def _typed(native: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library, told what its functions take, which halves what a call costs."""
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    table, positions = [pointer, pointer, number], [pointer, pointer, size]
    takes: dict[str, list[Any]] = {
        "shoal_gather_parts": [*table, *positions, size, pointer, size],
        "shoal_gather_windows": [*table, *positions, size, ctypes.c_int, ctypes.c_int, pointer, size],
        "shoal_ragged_offsets": [pointer, *table, *positions, pointer],
        "shoal_gather_ragged": [*table, *positions, size, pointer, pointer, size],
    }
    for name, types in takes.items():
        function = getattr(native, name)
        function.argtypes, function.restype = types, number if name != "shoal_gather_ragged" else None
    return native
