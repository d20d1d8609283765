"""Crops of JPEGs without decoding what is cut away.

1. `transcode` (jpeg_restart.py), once, at pack time: the same codes with a restart marker every K blocks of 16 pixels,
   and an index of where these segments are. The pixels are the same; the file grows by 1% to 4%.
2. `crop_resize_batch`, at each load: only the segments that cover the box are decoded, into planes of luma and chroma;
   these are resized to the output, flipped, and converted to RGB there. One call a batch, in threads, without the GIL.
3. Without an index (restart_blocks=0) a JPEG is read from its beginning to the end of the box. Progressive files, CMYK
   and unusual samplings are decoded whole, by libjpeg; what is no JPEG, and these kinds where shoal was installed
   without libjpeg-turbo, by Pillow. Baseline files, nearly all there are, need neither.

A 450x350 photograph has 29 x 22 blocks of 16x16. A crop of 200x150 needs at most 14 x 11 of them: a quarter of it.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError
from shoal.native import jpeg_fallback
from shoal.native.gather import Buffers, Indices, PartNumbers
from shoal.native.jpeg_library import PROBLEMS, UNSUPPORTED, Batch, Column, address, whole_decoder
from shoal.native.jpeg_restart import transcode
from shoal.native.library import library

__all__ = ["available", "crop_resize_batch", "crop_resize_pixels", "decode", "size_of", "sizes", "transcode"]

Box = tuple[int, int, int, int]
EMPTY = np.empty(0, np.uint8)


def available() -> bool:
    """Return whether baseline JPEGs can be cut into segments: whether shoal was installed with a C compiler."""
    return library() is not None


def size_of(jpeg: bytes | NDArray[np.uint8]) -> tuple[int, int]:
    """Return width and height of an image, from its header alone."""
    data = _as_array(jpeg)
    found, problems = sizes([data], [np.array([0, len(data)])], None, np.zeros(1, np.int64))
    if problems:
        raise DataError(f"An image of {len(data)} bytes has no size: {problems[0]}.")
    return int(found[0, 0]), int(found[0, 1])


def sizes(
    images: Buffers,
    offsets: Buffers,
    part: PartNumbers | None,
    row: Indices,
) -> tuple[NDArray[np.int32], dict[int, str]]:
    """Return width and height of each image, [count, 2], and of each that has none why, by its position."""
    column, found = Column.of(images, offsets), np.zeros((len(row), 2), np.int32)
    problems = np.full(len(row), UNSUPPORTED, np.int32)
    batch = Batch.of(column, None, part, row, problems)
    if (native := library()) is not None:
        native.shoal_jpeg_sizes(ctypes.byref(batch.c), address(found))
    said = {}
    for at in np.flatnonzero(problems).tolist():
        data = batch.image(at)
        if data is None or not _is_for_pillow(data, int(problems[at])):
            said[at] = PROBLEMS[int(problems[at])]
            continue
        try:
            found[at] = jpeg_fallback.size_of(data)
        except DataError as error:
            said[at] = str(error)
    return found, said


def decode(
    jpeg: bytes | NDArray[np.uint8], index: bytes | NDArray[np.uint8] | None = None, crop: Box | None = None
) -> NDArray[np.uint8]:
    """Return the pixels [h, w, 3] of a box (x, y, w, h), or of all: those of a whole decode, bit for bit.

    With the index that `transcode` gave, only the segments that cover the box are decoded.
    """
    data, segments = _as_array(jpeg), _as_array(index or b"" if not isinstance(index, np.ndarray) else index)
    x, y, w, h = crop or (0, 0, *size_of(data))
    native, whole = library(), whole_decoder()
    if native is None or not _is_jpeg(data):
        return jpeg_fallback.crop(jpeg_fallback.decode(data), (x, y, w, h))
    out = np.empty((max(h, 0), max(w, 0), 3), np.uint8)
    problem = native.shoal_jpeg_pixels(
        *(address(data), ctypes.c_size_t(len(data)), address(segments), ctypes.c_size_t(len(segments)), whole),
        *(*map(ctypes.c_int, (x, y, x + w, y + h)), address(out)),
    )
    if problem == UNSUPPORTED:
        return jpeg_fallback.crop(jpeg_fallback.decode(data), (x, y, w, h))
    if problem:
        raise DataError(f"An image of {len(data)} bytes cannot be decoded at {(x, y, w, h)}: {PROBLEMS[problem]}.")
    return out


def crop_resize_batch(  # noqa: PLR0917  the four buffers of two columns, then which rows
    images: Buffers,
    offsets: Buffers,
    indexes: Buffers | None,
    index_offsets: Buffers | None,
    part: PartNumbers | None,
    row: Indices,
    boxes: NDArray[Any],
    flips: NDArray[Any] | None,
    out: NDArray[np.uint8],
    *,
    antialias: bool = False,
    channels_last: bool = False,
    threads: int = 1,
    portable: bool = False,
) -> dict[int, str]:
    """Put box i (x, y, width, height) of image i into out[i], resized and flipped; return what failed, by position.

    Image i is row `row[i]` of part `part[i]`. `out` is [count, 3, H, W], or [count, H, W, 3] with `channels_last`.
    Bilinear, or with `antialias` a triangle as wide as an output pixel, as torch's interpolate has them (luma to the
    last bit but one; chroma is resized from its own resolution). An output that failed is undefined. `portable` is for
    tests: without the instructions that not every processor has, and the same bits.
    """
    height, width = _check_out(out, len(row), channels_last)
    boxes = np.ascontiguousarray(boxes, np.float64).reshape(-1, 4)
    flips = None if flips is None else np.ascontiguousarray(flips, np.uint8)
    if len(boxes) != len(row) or (flips is not None and len(flips) != len(row)):
        raise DataError(f"{len(row)} images need as many boxes and flips; there are {len(boxes)} boxes.")
    segments = None if indexes is None or index_offsets is None else Column.of(indexes, index_offsets)
    problems = np.full(len(row), UNSUPPORTED, np.int32)
    batch = Batch.of(Column.of(images, offsets), segments, part, row, problems)
    batch.c.boxes, batch.c.out, batch.c.whole = address(boxes), address(out), whole_decoder()
    batch.c.flips = None if flips is None else address(flips)
    batch.c.out_height, batch.c.out_width = height, width
    batch.c.is_planar, batch.c.antialias, batch.c.portable = not channels_last, antialias, portable
    if (native := library()) is not None:
        native.shoal_jpeg_crop_resize(ctypes.byref(batch.c), ctypes.c_size_t(threads))
    said = {}
    for at in np.flatnonzero(problems).tolist():
        data = batch.image(at)
        if data is None or not _is_for_pillow(data, int(problems[at])):
            said[at] = PROBLEMS[int(problems[at])]
            continue
        try:
            flip = flips is not None and bool(flips[at])
            pixels = jpeg_fallback.decode(data)
            crop_resize_pixels(pixels, boxes[at], flip, out[at], antialias=antialias, channels_last=channels_last)
        except DataError as error:
            said[at] = str(error)
    return said


def crop_resize_pixels(
    pixels: NDArray[np.uint8],
    box: NDArray[np.float64],
    flip: bool,
    out: NDArray[np.uint8],
    *,
    antialias: bool = False,
    channels_last: bool = False,
    portable: bool = False,
) -> None:
    """Put a box of decoded RGB pixels [h, w, 3] into `out`, resized and flipped as `crop_resize_batch` does it."""
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise DataError(f"Pixels are uint8 [h, w, 3]; these are {pixels.dtype}{list(pixels.shape)}.")
    height, width = _check_out(out[None], 1, channels_last)
    jpeg_fallback.check_box(tuple(box.tolist()), pixels.shape[1], pixels.shape[0])
    native, pixels = library(), np.ascontiguousarray(pixels)
    if native is None:
        found = jpeg_fallback.resize(pixels, box, flip, (height, width), antialias=antialias)
        out[:] = found if channels_last else found.transpose(2, 0, 1)
        return
    where = np.ascontiguousarray(box, np.float64)
    problem = native.shoal_rgb_crop_resize(
        *(address(pixels), ctypes.c_int(pixels.shape[1]), ctypes.c_int(pixels.shape[0]), address(where)),
        *map(ctypes.c_int, (flip, antialias, not channels_last, height, width, portable)),
        address(out),
    )
    if problem:
        raise DataError(f"An image of {pixels.shape[1]}x{pixels.shape[0]} cannot be resized: {PROBLEMS[problem]}.")


def _check_out(out: NDArray[np.uint8], count: int, channels_last: bool) -> tuple[int, int]:
    """Return height and width of the output."""
    wanted = "[count, H, W, 3]" if channels_last else "[count, 3, H, W]"
    channels = out.shape[-1 if channels_last else 1] if out.ndim == 4 else 0
    if out.dtype != np.uint8 or channels != 3 or len(out) != count or 0 in out.shape[1:]:
        raise DataError(f"{count} images do not go into {out.dtype}{list(out.shape)}. Pass uint8 {wanted}.")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise DataError("A batch goes into one contiguous, writable array; this one is a view with gaps or read-only.")
    return (out.shape[1], out.shape[2]) if channels_last else (out.shape[2], out.shape[3])


def _as_array(data: bytes | NDArray[np.uint8]) -> NDArray[np.uint8]:
    return data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8) if data else EMPTY


def _is_jpeg(data: NDArray[np.uint8]) -> bool:
    return data[:2].tobytes() == b"\xff\xd8"


def _is_for_pillow(data: NDArray[np.uint8], problem: int) -> bool:
    return problem == UNSUPPORTED or not _is_jpeg(data)
