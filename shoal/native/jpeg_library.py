"""The JPEG part of the C libraries: how its structures look from Python (jpeg_batch.c has the other side)."""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.native.gather import Array, Buffers, Indices, PartNumbers, Parts

LIBRARY = Path(__file__).with_name("shoal_jpeg.so")
UNSUPPORTED = 3
PROBLEMS = {
    1: "it is not a JPEG, is cut short or is damaged",
    2: "its index of segments belongs to another image: the pack is damaged",
    UNSUPPORTED: "it is a kind of JPEG that nothing here decodes",
    4: "the box that was asked for is not inside it",
    5: "there is no memory for it",
    6: "the pack has no such row, or its offsets are damaged",
}


@cache
def jpeg_library() -> ctypes.CDLL | None:
    """Return the library that needs libjpeg-turbo; None where shoal was installed without it."""
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None


def whole_decoder() -> ctypes.c_void_p | None:
    """Return the address of the function that decodes whole images, for the other library to call."""
    native = jpeg_library()
    return None if native is None else ctypes.cast(native.shoal_jpeg_whole, ctypes.c_void_p)


def address(array: Array) -> ctypes.c_void_p:
    """Return where an array begins, for C."""
    return ctypes.c_void_p(array.ctypes.data)


class _Column(ctypes.Structure):
    _fields_ = (
        ("bases", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("images", _Column),
        ("indexes", _Column),
        ("part", ctypes.c_void_p),
        ("row", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("boxes", ctypes.c_void_p),
        ("flips", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("problems", ctypes.c_void_p),
        ("whole", ctypes.c_void_p),
        ("out_height", ctypes.c_int32),
        ("out_width", ctypes.c_int32),
        ("is_planar", ctypes.c_int32),
        ("antialias", ctypes.c_int32),
        ("portable", ctypes.c_int32),
    )


class Column:
    """Variable rows of bytes in the parts of a pack: row r of a part is values[offsets[r]:offsets[r + 1]]."""

    def __init__(self, values: Parts, offsets: Parts) -> None:
        self.values, self.offsets = values, offsets
        self.num_rows = np.maximum(offsets.lengths - 1, 0)
        self.c = _Column(
            *map(address, (values.addresses, values.lengths, offsets.addresses, self.num_rows)),
            ctypes.c_int64(min(len(values), len(offsets))),
        )

    @classmethod
    def of(cls, values: Buffers, offsets: Buffers) -> "Column":
        """Return the column of these buffers and their offsets."""
        return cls(
            values if isinstance(values, Parts) else Parts(values),
            offsets if isinstance(offsets, Parts) else Parts(offsets),
        )


class Batch:
    """Which rows of a column a call is about; it keeps alive what C reads."""

    def __init__(
        self,
        images: Column,
        indexes: Column | None,
        part: PartNumbers | None,
        row: Indices,
        problems: NDArray[np.int32],
    ) -> None:
        self.images, self.indexes, self.part, self.row, self.problems = images, indexes, part, row, problems
        self.c = _Batch()
        self.c.images, self.c.indexes = images.c, _Column() if indexes is None else indexes.c
        self.c.part, self.c.row = None if part is None else address(part), address(row)
        self.c.count, self.c.problems = len(row), address(problems)

    @classmethod
    def of(
        cls,
        images: Column,
        indexes: Column | None,
        part: PartNumbers | None,
        row: Indices,
        problems: NDArray[np.int32],
    ) -> "Batch":
        """Return the batch, with its positions as C reads them."""
        numbers = None if part is None else np.ascontiguousarray(part, np.int32)
        assert numbers is None or len(numbers) == len(row), "each row has one part"
        return cls(images, indexes, numbers, np.ascontiguousarray(row, np.int64), problems)

    def image(self, at: int) -> NDArray[np.uint8] | None:
        """Return the bytes of the image at a position; None where the pack has no such row."""
        number, row = 0 if self.part is None else int(self.part[at]), int(self.row[at])
        if not (0 <= number < self.images.c.num_parts and 0 <= row < self.images.num_rows[number]):
            return None
        values, offsets = self.images.values.arrays[number], self.images.offsets.arrays[number]
        if values is None or offsets is None:
            return None
        begin, end = int(offsets[row]), int(offsets[row + 1])
        return values[begin:end] if 0 <= begin <= end <= len(values) else None
