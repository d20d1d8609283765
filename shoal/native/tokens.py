"""Documents in rows of tokens: which token belongs to which, and how whole ones fill rows of one length."""

import ctypes
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError
from shoal.native.gather import Parts
from shoal.native.library import library

Indices = NDArray[np.int64]
EVERY = 32
"""Of so many rows it is kept where one begins; the others are found from there: 0.25 bytes a row, and 1 us."""


def document_places(
    offsets: Parts,
    part: NDArray[np.int32],
    start: Indices,
    length: Indices,
    *,
    document: NDArray[np.int32],
    position: NDArray[np.int32],
) -> None:
    """Put into `document` and `position` [count, width] where the tokens [start, start + length) of each row belong.

    Documents are counted from 0 in each row, positions from the document's beginning. What lies beyond `length` is in
    document -1. `offsets` of each part say where its documents begin in its stream of tokens.
    """
    native = library()
    part, start = np.ascontiguousarray(part, dtype=np.int32), np.ascontiguousarray(start, dtype=np.int64)
    if native is None:
        wrong = _places_plainly(offsets, part, start, length, document=document, position=position)
    else:
        num_documents = offsets.lengths - 1
        function = native.shoal_document_places
        function.restype = ctypes.c_int64
        wrong = function(
            *(_at(offsets.addresses), _at(num_documents), ctypes.c_int64(len(offsets))),
            *(_at(part), _at(start), _at(length), ctypes.c_size_t(len(start)), ctypes.c_size_t(document.shape[1])),
            *(_at(document), _at(position)),
        )
    if wrong >= 0:
        raise DataError(f"the tokens from {start[wrong]} on leave part {part[wrong]}: its offsets are damaged.")


def mark_rows(offsets: Indices, width: int) -> tuple[int, Indices]:
    """Return how many rows a stream of documents fills, and where each EVERY-th of them begins.

    Each row takes whole documents in their order until the next one does not fit into `width` tokens; a longer one is
    cut. Example: documents of 3, 4, 2 and 9 tokens in rows of 6 are rows from 0, 3, 9 and 15 on.
    """
    _check(offsets)
    # A row is more than half full together with the next one, so there cannot be more of them.
    most = 2 * (int(offsets[-1] - offsets[0]) // width + 1)
    marks = np.empty(-(-most // EVERY), dtype=np.int64)
    count = _mark(offsets, width, marks)
    return count, marks[: -(-count // EVERY)].copy()


def count_rows(offsets: Indices, width: int) -> int:
    """Return how many rows of `width` a stream of documents fills."""
    _check(offsets)
    return _mark(offsets, width, np.empty(0, dtype=np.int64))


def rows_at(offsets: Parts, marks: Parts, part: NDArray[np.int32], row: Indices, width: int) -> tuple[Indices, Indices]:
    """Return where each row begins and ends in the stream of its part, of which `mark_rows` has given the marks."""
    native = library()
    part, row = np.ascontiguousarray(part, dtype=np.int32), np.ascontiguousarray(row, dtype=np.int64)
    begin, end = np.empty_like(row), np.empty_like(row)
    if native is None:
        wrong = _rows_plainly(offsets, marks, part, row, width, begin=begin, end=end)
    else:
        num_documents, function = offsets.lengths - 1, native.shoal_rows_at
        function.restype = ctypes.c_int64
        wrong = function(
            *(_at(offsets.addresses), _at(num_documents), _at(marks.addresses), _at(marks.lengths)),
            *map(ctypes.c_int64, (min(len(offsets), len(marks)), width, EVERY)),
            *(_at(part), _at(row), ctypes.c_size_t(len(row)), _at(begin), _at(end)),
        )
    if wrong >= 0:
        raise DataError(f"row {row[wrong]} of {width} tokens is not in part {part[wrong]}: its offsets are damaged.")
    return begin, end


def _check(offsets: Indices) -> None:
    if offsets[0] < 0 or np.any(offsets[1:] < offsets[:-1]):
        raise DataError("the offsets of a column of tokens decrease: the part is damaged.")


def _mark(offsets: Indices, width: int, marks: Indices) -> int:
    native = library()
    if native is None:
        rows = _fill_plainly(offsets.tolist(), width)
        found = np.array(rows[::EVERY], dtype=np.int64)[: len(marks)]
        marks[: len(found)] = found
        return len(rows)
    function = native.shoal_mark_rows
    function.restype = ctypes.c_size_t
    offsets = np.ascontiguousarray(offsets, dtype=np.int64)
    sizes = ctypes.c_size_t(len(offsets) - 1), ctypes.c_int64(width), ctypes.c_size_t(EVERY)
    return int(function(_at(offsets), *sizes, _at(marks), ctypes.c_size_t(len(marks))))


def _rows_plainly(
    offsets: Parts, marks: Parts, part: NDArray[np.int32], row: Indices, width: int, *, begin: Indices, end: Indices
) -> int:
    for i, (number, at) in enumerate(zip(part.tolist(), row.tolist(), strict=True)):
        begins = offsets.arrays[number] if 0 <= number < min(len(offsets), len(marks)) else None
        if begins is None or not 0 <= at // EVERY < marks.lengths[number]:
            return i
        bounds = [*_fill_plainly(begins.tolist(), width), int(begins[-1])]
        if at + 1 >= len(bounds):
            return i
        begin[i], end[i] = bounds[at], bounds[at + 1]
    return -1


def _places_plainly(
    offsets: Parts,
    part: NDArray[np.int32],
    start: Indices,
    length: Indices,
    *,
    document: NDArray[np.int32],
    position: NDArray[np.int32],
) -> int:
    width = document.shape[1]
    for i, (number, first, count) in enumerate(zip(part.tolist(), start.tolist(), length.tolist(), strict=True)):
        begins = offsets.arrays[number] if 0 <= number < len(offsets) else None
        if begins is None or len(begins) < 2 or not 0 <= count <= width:
            return i
        if not begins[0] <= first <= begins[-1] - count:
            return i
        tokens = np.arange(first, first + count)
        owner = np.searchsorted(begins[:-1], tokens, side="right") - 1
        document[i], position[i] = -1, 0
        if count:
            document[i, :count] = np.cumsum(np.diff(owner, prepend=owner[:1]) > 0)
            position[i, :count] = tokens - begins[owner]
    return -1


def _fill_plainly(offsets: list[int], width: int) -> list[int]:
    rows, begin = [], offsets[0]
    for first, last in pairwise(offsets):
        if last - begin > width and first > begin:
            rows.append(begin)
            begin = first
        while last - begin > width:
            rows.append(begin)
            begin += width
    return [*rows, begin] if offsets[-1] > begin else rows


def _at(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.__array_interface__["data"][0])
