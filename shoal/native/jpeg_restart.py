"""JPEGs cut into segments: a restart marker every K blocks of 16 pixels, and an index of where the segments are.

1. Baseline files are cut by shoal's own C (jpeg_restart.c), which copies their codes as they are: nothing but a C
   compiler is needed for them. 9,000 photographs of 450x350 a second on one core (an EPYC of 3.5 GHz, 2026-11), some of
   them at once.
2. What that refuses is looked at by libjpeg-turbo, where shoal was installed with it: baseline files in several scans,
   or with harmless oddities, are encoded anew; progressive, arithmetic-coded, CMYK and oddly sampled ones are left as
   they are; damaged ones are named.

Example: a photograph of 45 kB is cut into 319 segments, grows by 1.2 kB, and its index has 440 bytes.
"""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError
from shoal.native.jpeg_library import PROBLEMS, UNSUPPORTED, address, jpeg_library
from shoal.native.library import library

Rows = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Bytes end to end, and where each row begins and the last one ends."""

Memory = Callable[[int], NDArray[np.uint8]]
"""Returns so many bytes, whatever they are."""


def fresh(num_bytes: int) -> NDArray[np.uint8]:
    """Return so many bytes that nobody has had before."""
    return np.empty(num_bytes, np.uint8)


class _Cuts(ctypes.Structure):
    _fields_ = (
        ("images", ctypes.c_void_p),
        ("image_bytes", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("restart", ctypes.c_int32),
        ("portable", ctypes.c_int32),
        ("problems", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("out_room", ctypes.c_int64),
        ("index_room", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("index_offsets", ctypes.c_void_p),
    )


class Cuts:
    """Some images, those of them that are plain baseline JPEGs cut into segments. One call into C, without the GIL.

    `left` are the positions of the others, each with the number of its problem; `put` says what is stored for one of
    them, else it is stored as it is. `collect` gives the rows.
    """

    def __init__(
        self,
        images: Sequence[bytes],
        restart_blocks: int,
        *,
        memory: Memory = fresh,
        portable: bool = False,
    ) -> None:
        """`memory` returns so many bytes for the rows, which may be used again when nobody holds the rows any more.

        `portable` is for tests: without the instructions that not every processor has, and the same bits.
        """
        check_blocks(restart_blocks)
        self._images, self._put, count, native = images, dict[int, tuple[bytes, bytes]](), len(images), library()
        problems, sizes = np.full(count, UNSUPPORTED, np.int32), np.fromiter(map(len, images), np.int64, count)
        room = int(sizes.sum())
        most, most_index = 2 * room + 4096 * count, room + 64 * count
        rows, indexes = np.split(memory(most + most_index), [most])
        self._rows: Rows = rows, np.zeros(count + 1, np.int64)
        self._indexes: Rows = indexes, np.zeros(count + 1, np.int64)
        if native is not None and restart_blocks and count:
            addresses = (ctypes.c_char_p * count)(*images)
            cuts = _Cuts(ctypes.addressof(addresses), address(sizes), count, restart_blocks, portable)
            (cuts.out, cuts.offsets), (cuts.index, cuts.index_offsets) = map(_addresses, (self._rows, self._indexes))
            cuts.out_room, cuts.index_room = len(self._rows[0]), len(self._indexes[0])
            cuts.problems = address(problems)
            native.shoal_jpeg_cut(ctypes.byref(cuts))
        self.left = {at: int(problems[at]) for at in np.flatnonzero(problems).tolist()}

    def put(self, at: int, stored: bytes, index: bytes) -> None:
        """Store these bytes for an image that was left, and this index."""
        self._put[at] = stored, index

    def collect(self, kept: NDArray[np.int64]) -> tuple[Rows, Rows]:
        """Return the images at positions `kept` end to end, and their indexes."""
        if not self.left and len(kept) == len(self._images):
            return _used(self._rows), _used(self._indexes)
        both = [self._put.get(at) or self._row(at) for at in kept.tolist()]
        return _end_to_end([image for image, _ in both]), _end_to_end([index for _, index in both])

    def _row(self, at: int) -> tuple[bytes, bytes]:
        if at in self.left:
            return self._images[at], b""
        (image, offsets), (index, index_offsets) = self._rows, self._indexes
        return (
            image[offsets[at] : offsets[at + 1]].tobytes(),
            index[index_offsets[at] : index_offsets[at + 1]].tobytes(),
        )


def transcode(jpeg: bytes, restart_blocks: int = 2) -> tuple[bytes, bytes]:
    """Return the same image cut into segments `restart_blocks` blocks of 16 pixels wide, and the index of the segments.

    What cannot be cut (progressive, CMYK, other samplings than 4:4:4, 4:2:2, 4:4:0, 4:2:0 and grey) comes back as it
    is, with an empty index; so does everything where shoal was installed without a C compiler. DataError for what is
    cut short or broken.
    """
    cuts = Cuts([jpeg], restart_blocks)
    if library() is None or restart_blocks == 0:
        return jpeg, b""
    if cuts.left:
        return transcode_left(jpeg, restart_blocks, cuts.left[0])
    (image, _), (index, _) = cuts.collect(np.zeros(1, np.int64))
    return image.tobytes(), index.tobytes()


def transcode_left(jpeg: bytes, restart_blocks: int, problem: int) -> tuple[bytes, bytes]:
    """Return what `transcode` does, of an image that the fast way left with this problem: what libjpeg says of it."""
    native = jpeg_library()
    out, index = ctypes.c_void_p(), ctypes.c_void_p()
    out_bytes, index_bytes = ctypes.c_size_t(), ctypes.c_size_t()
    if native is not None:
        problem = native.shoal_jpeg_transcode(
            *(jpeg, ctypes.c_size_t(len(jpeg)), ctypes.c_int(restart_blocks)),
            *(ctypes.byref(out), ctypes.byref(out_bytes), ctypes.byref(index), ctypes.byref(index_bytes)),
        )
    if problem and not (native is None and problem == UNSUPPORTED):
        raise DataError(f"A JPEG of {len(jpeg)} bytes cannot be packed: {PROBLEMS[problem]}.")
    if native is None or not out.value or not index.value:
        return jpeg, b""
    try:
        return ctypes.string_at(out, out_bytes.value), ctypes.string_at(index, index_bytes.value)
    finally:
        native.shoal_jpeg_free(out)
        native.shoal_jpeg_free(index)


def check_blocks(restart_blocks: int) -> None:
    """Raise where the file format has no room for such segments."""
    if not 0 <= restart_blocks <= 32767:
        raise DataError(f"restart_blocks={restart_blocks} is not between 0 (leave JPEGs as they are) and 32767.")


def _addresses(rows: Rows) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    return address(rows[0]), address(rows[1])


def _used(rows: Rows) -> Rows:
    return rows[0][: rows[1][-1]], rows[1]


def _end_to_end(rows: list[bytes]) -> Rows:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.frombuffer(b"".join(rows), np.uint8), offsets
