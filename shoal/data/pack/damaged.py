"""Values that a column cannot hold: in a pack that was damaged, as no pack is written with such."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError


def text_of(row: bytes, what: str) -> str:
    """Return the text of a row; `what` names it where it is none."""
    try:
        return row.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{what}: its text is damaged: byte {error.start} of {len(row):,} is not UTF-8.") from None


def is_shape(shape: Sequence[int], count: int) -> bool:
    """Return whether a row of `count` elements can have this shape."""
    return min(shape, default=0) >= 0 and math.prod(shape) == count


def wrong_shape(shape: Sequence[int], count: int, what: str) -> DataError:
    """Return what is said of a row that cannot; `what` names it."""
    return DataError(f"{what}: its shape is damaged: {list(shape)} of {count:,} elements.")


def first_wrong_text(values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> int | None:
    """Return the first row that is no UTF-8. All are looked at together first: rows that are wrong are rare."""
    begins = offsets[:-1][np.diff(offsets) > 0]
    is_right = not np.any(values[begins] & 0xC0 == 0x80)  # none begins within a character
    if is_right and _is_utf8(values[offsets[0] : offsets[-1]].tobytes()):
        return None
    rows = enumerate(pairwise(offsets.tolist()))
    return next((row for row, (begin, end) in rows if not _is_utf8(values[begin:end].tobytes())), None)


def first_wrong_shape(sizes: NDArray[np.int64], counts: NDArray[np.int64]) -> int | None:
    """Return the first row whose shape, [rows, dimensions], does not give so many elements."""
    # In floats, which do not wrap; counts are far from what these cannot hold.
    wrong = np.flatnonzero((sizes.astype(np.float64).prod(axis=1) != counts) | (sizes < 0).any(axis=1))
    return int(wrong[0]) if wrong.size else None


def first_wrong_bool(values: NDArray[Any], offsets: NDArray[np.int64] | None) -> int | None:
    """Return the first row with a byte that is neither 0 nor 1."""
    wrong = np.flatnonzero(values.reshape(-1).view(np.uint8) > 1)
    if not wrong.size:
        return None
    if offsets is None:
        return int(wrong[0]) // math.prod(values.shape[1:])
    return int(np.searchsorted(offsets, wrong[0], side="right")) - 1


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
