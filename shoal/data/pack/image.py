"""Encoded images on their way into a pack: whole, and JPEGs with restart segments where shoal has its C part."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError
from shoal.data.pack.infer import is_image
from shoal.data.pack.schema import Flat
from shoal.native import jpeg
from shoal.native.jpeg_restart import Cuts, Memory, fresh, transcode_left

_SOS = 0xDA
_NO_LENGTH = {0x01, *range(0xD0, 0xD9)}
_JPEG = b"\xff\xd8"


class EncodedImages:
    """What a pack stores for some encoded images; `errors` says, by position, which cannot be stored."""

    def __init__(self, images: Sequence[bytes], restart_blocks: int, *, memory: Memory = fresh) -> None:
        self._images, self.errors = images, dict[int, DataError]()
        is_cut = restart_blocks > 0 and jpeg.available()
        self._cuts = Cuts(images, restart_blocks, memory=memory) if is_cut else None
        left = range(len(images)) if self._cuts is None else self._cuts.left
        for at in left:
            try:
                self._look_at(at, restart_blocks)
            except DataError as error:
                self.errors[at] = error

    def _look_at(self, at: int, restart_blocks: int) -> None:
        """Store an image that was not cut as it is, or as libjpeg cuts it; raise what is wrong with it."""
        image = self._images[at]
        check_whole(image)
        if not is_image(image[:16]):
            raise DataError(f"it is no image: it begins with {image[:8]!r}")
        if self._cuts is not None and image.startswith(_JPEG):
            self._cuts.put(at, *transcode_left(image, restart_blocks, self._cuts.left[at]))

    def collect(self, kept: NDArray[np.int64]) -> tuple[Flat, Flat]:
        """Return the stored images at positions `kept`, and the indexes of their segments (empty: it has none)."""
        if self._cuts is not None:
            images, indexes = self._cuts.collect(kept)
            return Flat(*images), Flat(*indexes)
        rows = [self._images[at] for at in kept.tolist()]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        nothing = Flat(np.empty(0, np.uint8), np.zeros(len(rows) + 1, np.int64))
        return Flat(np.frombuffer(b"".join(rows), np.uint8), offsets), nothing


def check_whole(data: bytes) -> None:
    """Raise what an image lacks at its end, by what its format says; the pixels are not decoded."""
    if len(data) == 0:
        raise DataError("the image is empty")
    if data.startswith(b"\xff\xd8"):
        _check_jpeg(data)
    elif data.startswith(b"\x89PNG"):
        if data.find(b"IEND", max(0, len(data) - 4096)) < 0:
            raise DataError(f"the PNG is truncated: its {len(data):,} bytes have no IEND at their end")
    elif data.startswith(b"RIFF") and int.from_bytes(data[4:8], "little") + 8 > len(data):
        said = int.from_bytes(data[4:8], "little") + 8
        raise DataError(f"the WebP is truncated: it has {len(data):,} bytes, its header says {said:,}")


def _check_jpeg(data: bytes) -> None:
    """A JPEG is marker segments up to the first scan, which only the end marker ends: data inside has no 0xFFD9."""
    place = 2
    while place + 4 <= len(data):
        if data[place] != 0xFF:
            raise DataError(f"the JPEG is damaged: there is no marker at byte {place:,}")
        marker = data[place + 1]
        if marker == 0xFF:
            place += 1
        elif marker in _NO_LENGTH:
            place += 2
        elif marker == _SOS:
            if data.rfind(b"\xff\xd9", place) < 0:
                raise DataError(f"the JPEG is truncated: its {len(data):,} bytes have no end marker")
            return
        else:
            place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    raise DataError(f"the JPEG is truncated: its {len(data):,} bytes hold no image data")
