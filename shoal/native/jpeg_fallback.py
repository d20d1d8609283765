"""What decodes and resizes images where C cannot: Pillow for the pixels, NumPy for jpeg_resize.c's arithmetic."""

import io
import math
import struct
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError

_BROKEN = (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, OverflowError, struct.error)
"""What Pillow raises of damaged files, by their format."""
ONE, DOWN_SHIFT, ALONG_SHIFT, FRACTION_BITS = 1 << 14, 7, 15, 6  # as in jpeg_resize.c


def size_of(data: NDArray[np.uint8]) -> tuple[int, int]:
    """Return width and height of an image of any format that Pillow knows."""
    with _open(data) as image:
        width, height = image.size
        return int(width), int(height)


def decode(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the pixels [h, w, 3] of an image of any format that Pillow knows."""
    with _open(data) as image:
        try:
            return np.asarray(image.convert("RGB"))
        except _BROKEN as error:
            raise DataError(f"Pillow cannot decode an image of {len(data)} bytes: {error}.") from error


def _open(data: NDArray[np.uint8]) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "An image of this kind needs Pillow, which is not installed. Write: pip install 'shoal[images]'"
        ) from error
    try:
        return Image.open(io.BytesIO(data.tobytes()))
    except (*_BROKEN, Image.DecompressionBombError) as error:
        raise DataError(f"Pillow cannot read an image of {len(data)} bytes: {error}.") from error


def crop(pixels: NDArray[np.uint8], box: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    """Return the pixels of a box (x, y, w, h)."""
    check_box(box, pixels.shape[1], pixels.shape[0])
    x, y, w, h = box
    return np.ascontiguousarray(pixels[y : y + h, x : x + w])


def check_box(box: tuple[float, ...], width: int, height: int) -> None:
    """Raise where a box is not inside an image."""
    x, y, w, h = box
    if not (x >= 0 and y >= 0 and w > 0 and h > 0 and x + w <= width and y + h <= height):
        raise DataError(f"The box x={x}, y={y}, {w}x{h} is not inside an image of {width}x{height}.")


def resize(
    pixels: NDArray[np.uint8], box: NDArray[np.float64], flip: bool, size: tuple[int, int], *, antialias: bool
) -> NDArray[np.uint8]:
    """Return a box of pixels resized to (height, width), the same bits as jpeg_resize.c gives for RGB."""
    x, y, w, h = box.tolist()
    rows, row_weights = _taps(y, h, pixels.shape[0], size[0], antialias)
    columns, column_weights = _taps(x, w, pixels.shape[1], size[1], antialias)
    if flip:
        columns, column_weights = columns[::-1], column_weights[::-1]
    down = np.einsum("it,itxc->ixc", row_weights, pixels[rows].astype(np.int32))
    between = (down + (1 << (DOWN_SHIFT - 1))) >> DOWN_SHIFT
    along = np.einsum("jt,ijtc->ijc", column_weights, between[:, columns])
    values = (along + (1 << (ALONG_SHIFT - 1))) >> ALONG_SHIFT
    found: NDArray[np.uint8] = ((values + (1 << (FRACTION_BITS - 1))) >> FRACTION_BITS).astype(np.uint8)
    return found


def _taps(
    begin: float, length: float, whole: int, out: int, antialias: bool
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return, for each output pixel, the samples it takes and their weights, which add up to 16,384."""
    low, high, scale = math.floor(begin), min(math.ceil(begin + length), whole), length / out
    is_wide = antialias and scale > 1
    count = math.ceil(scale) * 2 + 1 if is_wide else 2
    samples, weights = np.zeros((out, count), np.int64), np.zeros((out, count), np.int32)
    for i in range(out):
        centre = begin + (i + 0.5) * scale
        found = _under_triangle(centre, scale, low, high) if is_wide else _between_two(centre - 0.5, low, high)
        samples[i] = np.minimum(found[0] + np.arange(count), high - 1)
        weights[i, : len(found[1])] = found[1]
    return samples, weights


def _between_two(place: float, low: int, high: int) -> tuple[int, list[int]]:
    place = min(max(place, low), high - 1)
    left = int(place)
    weight = int((place - left) * ONE + 0.5)
    return left, [ONE - weight, weight]


def _under_triangle(centre: float, scale: float, low: int, high: int) -> tuple[int, list[int]]:
    begin, end = max(math.floor(centre - scale + 0.5), low), min(math.floor(centre + scale + 0.5), high)
    heights = [max(1 - abs((k + 0.5 - centre) / scale), 0.0) for k in range(begin, end)]
    total, running, sums = sum(heights), 0.0, [0]
    for height in heights:
        running += height
        sums.append(int(running / total * ONE + 0.5))
    return begin, [after - before for before, after in pairwise(sums)]
