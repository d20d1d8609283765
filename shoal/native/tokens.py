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


def fill_rows(offsets: Indices, width: int) -> Indices:
    """Return where each row begins in a stream of documents, and where the last ends.

    Each row takes whole documents in their order until the next one does not fit into `width` tokens; a longer one is
    cut. Example: documents of 3, 4, 2 and 9 tokens in rows of 6 begin at 0, 3, 9, 15 and end at 18.
    """
    native = library()
    if np.any(np.diff(offsets) < 0):
        raise DataError("the offsets of a column of tokens decrease: the part is damaged.")
    if native is None:
        return np.array([*_fill_plainly(offsets.tolist(), width), offsets[-1]], dtype=np.int64)
    function = native.shoal_fill_rows
    function.restype = ctypes.c_size_t
    offsets = np.ascontiguousarray(offsets, dtype=np.int64)
    # A row is more than half full together with the next one, so there cannot be more of them.
    rows = np.empty(2 * (int(offsets[-1] - offsets[0]) // width + 1) + 1, dtype=np.int64)
    sizes = ctypes.c_size_t(len(offsets) - 1), ctypes.c_int64(width)
    count = function(_at(offsets), *sizes, _at(rows), ctypes.c_size_t(len(rows) - 1))
    assert count < len(rows), (count, len(rows))
    rows[count] = offsets[-1]
    return rows[: count + 1].copy()


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
